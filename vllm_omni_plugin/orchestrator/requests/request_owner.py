"""The unfinished requests, and what AsyncLLM's side says of them."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    AbortRequests,
    FrontMessage,
    OutputUnusable,
    SubmitRequest,
)
from vllm_omni_plugin.orchestrator.requests.run_events import Accepted, RunEvent
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, ThreadQueue

logger = init_logger(__name__)

S = TypeVar("S")


class RequestTable(dict[str, S], Generic[S]):
    """States of unfinished requests by the client's id. Lives on the orchestrator's loop.

    Only `pop` and `clear` take requests out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._waiter: asyncio.Future[None] | None = None

    async def until_none(self) -> None:
        """Return once there is none. One at a time may wait."""
        while self:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    def pop(self, request_id: str, *default: Any) -> Any:
        """As of any dictionary."""
        state = super().pop(request_id, *default)
        if not self:
            self._tell()
        return state

    def clear(self) -> None:
        """As of any dictionary."""
        super().clear()
        self._tell()

    def _tell(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Requests(ABC, Generic[S]):
    """Owns all unfinished requests; `SingleStage` and `PipelineRequests` say how. Nothing in it blocks.

    Args:
        put: gives an item to AsyncLLM's side.

    Attributes:
        states: unfinished requests by the client's id.
    """

    def __init__(self, put: Callable[[Any], None]) -> None:
        self.states: RequestTable[S] = RequestTable()
        self._put = put

    async def serve(self, queue: ThreadQueue[FrontMessage], on_unusable: Callable[[OutputUnusable], None]) -> None:
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
    def take(self, stage_id: int, accepted: Sequence[Accepted]) -> list[Any]:
        """A stage has put something out.

        Returns:
            The outputs that go to vLLM's server.
        """

    @abstractmethod
    def handle(self, stage_id: int, events: Sequence[RunEvent]) -> None:
        """What the stage's dispatcher returned."""

    def close(self) -> None:
        """Give up what still waits. Idempotent."""
        self.states.clear()

    def _fail_alone(self, message: FrontMessage, error: Exception) -> None:
        """What is wrong with one message, or with our handling of it, ends that request and nothing else."""
        if not isinstance(message, SubmitRequest):
            logger.error("%r could not be dealt with.", message, exc_info=error)
            return
        logger.error("Request %s cannot be served.", message.request.request_id, exc_info=error)
        try:
            self.fail(message, OmniError(f"The request failed: {error!r}"))
        except Exception:
            logger.exception("Nor could its client be told of that.")
