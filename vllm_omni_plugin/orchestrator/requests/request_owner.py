"""The unfinished requests, and what AsyncLLM's side says of them."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from vllm_omni_plugin.admission import Ticket
from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    AbortRequests,
    OutputUnusable,
    PipelineCallEnded,
    RequestFailed,
    RequestMessage,
    SubmitRequest,
)
from vllm_omni_plugin.orchestrator.requests.stage_run import Accepted, RunEnded
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, ThreadQueue

logger = init_logger(__name__)


class RequestState(Protocol):
    """What is looked at of an unfinished request."""

    ticket: Ticket
    """Its place in the order of all."""

    @property
    def answer_tokens(self) -> int:
        """Tokens of its answer so far."""


S = TypeVar("S", bound=RequestState)


class RequestOwner(ABC, Generic[S]):
    """Owns all unfinished requests; `SingleStageRequests` and `PipelineRequests` say how. Nothing in it blocks.

    Args:
        put: gives an item to AsyncLLM's side.
        left: gives back the ticket of a request that has ended, with the number of its answer's tokens.

    Attributes:
        states: unfinished requests by the client's id; only `_drop` takes one out.
    """

    def __init__(self, put: Callable[[Any], None], left: Callable[[Ticket, int], None]) -> None:
        self.states: dict[str, S] = {}
        self._put = put
        self._left = left
        self._empty: asyncio.Future[None] | None = None

    async def wait_until_empty(self) -> None:
        """Return once no request is unfinished. One at a time may wait."""
        while self.states:
            self._empty = asyncio.get_running_loop().create_future()
            await self._empty

    async def serve(self, queue: ThreadQueue[RequestMessage], on_unusable: Callable[[OutputUnusable], None]) -> None:
        """Take what AsyncLLM's side says of requests, in order, until the queue is closed.

        Args:
            queue: of these messages.
            on_unusable: called with what it says of a replica instead.
        """
        while True:
            try:
                batch = await queue.get_batch()
            except QueueClosedError:
                return
            for message in batch:
                try:
                    if isinstance(message, SubmitRequest):
                        self.submit(message)
                    elif isinstance(message, AbortRequests):
                        self.abort(message.request_ids, message.whole)
                    else:
                        on_unusable(message)
                except Exception as error:
                    self._fail_alone(message, error)

    @abstractmethod
    def submit(self, message: SubmitRequest) -> None:
        """Take a new request, or a further chunk of a streaming-input session."""

    @abstractmethod
    def fail(self, message: SubmitRequest, error: OmniError) -> None:
        """End a request that `submit` raised an error of, whatever of it has begun."""

    @abstractmethod
    def abort(self, request_ids: Sequence[str], whole: bool) -> None:
        """The client does not want these any more; see `AbortRequests`. Unknown ids are those that have just ended."""

    @abstractmethod
    def accept_outputs(self, stage_id: int, accepted: Sequence[Accepted]) -> list[Any]:
        """A stage has put something out.

        Returns:
            The outputs that go to vLLM's server.
        """

    @abstractmethod
    def runs_ended(self, stage_id: int, ended: Sequence[RunEnded]) -> None:
        """These runs have ended, as the stage's dispatcher returned."""

    def close(self) -> None:
        """Give up what still waits. Idempotent."""
        for request_id in list(self.states):
            self._drop(request_id)

    def _drop(self, request_id: str) -> S | None:
        """Take out a request that has ended, if it is there."""
        state = self.states.pop(request_id, None)
        if state is not None:
            self._left(state.ticket, state.answer_tokens)
        if not self.states and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)
        return state

    def _fail_alone(self, message: RequestMessage, error: Exception) -> None:
        """What is wrong with one message, or with our handling of it, ends that request and nothing else."""
        if not isinstance(message, SubmitRequest):
            logger.error("%r could not be dealt with.", message, exc_info=error)
            return
        logger.error("Request %s cannot be served.", message.request.request_id, exc_info=error)
        try:
            self.fail(message, OmniError(f"The request failed: {error!r}"))
        except Exception:
            logger.exception("Nor could its client be told of that.")


def refuse(message: SubmitRequest, error: OmniError, put: Callable[[Any], None]) -> None:
    """End a request that cannot be begun."""
    put(RequestFailed(message.request.request_id, error))
    if message.call is not None:
        message.call.put(PipelineCallEnded(error))
