"""The table of unfinished requests, and the handling of AsyncLLM's messages about them."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Final, Generic, TypeVar

from msgspec import Struct, field

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
from vllm_omni_plugin.orchestrator.requests.stage_run import Accepted, RunEnded, StageRun

logger = init_logger(__name__)


class OrchestratorRequestState(Struct, eq=False):
    """One request from acceptance until every stage that it needs has ended.

    `request` is vLLM's `EngineCoreRequest` as the client submitted it; `runs` are those of the stages that have begun,
    by stage id.
    """

    request: Any
    ticket: Ticket | None
    runs: dict[int, StageRun] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        """The id under which the client knows the request."""
        request_id: Final[str] = self.request.request_id
        return request_id

    @property
    def answer_tokens(self) -> int:
        return len(self.runs[0].produced)


S = TypeVar("S", bound=OrchestratorRequestState)


class RequestOwner(ABC, Generic[S]):
    """Owns all unfinished requests. Subclasses: `SingleStageRequests`, `PipelineRequests`. Nothing in it blocks.

    `put` sends an item to AsyncLLM. `ticket_ended` takes the ticket of an ended request, and the number of tokens of
    its answer; None without admission control. `states` are by the client's id; only `_drop` removes entries.
    """

    def __init__(self, put: Callable[[Any], None], ticket_ended: Callable[[Ticket, int], None] | None) -> None:
        self.states: dict[str, S] = {}
        self._put = put
        self._ticket_ended = ticket_ended
        self._empty: asyncio.Future[None] | None = None

    async def wait_until_empty(self) -> None:
        """Return once no request is unfinished. Only one coroutine may wait at a time."""
        while self.states:
            self._empty = asyncio.get_running_loop().create_future()
            await self._empty

    def handle(self, message: RequestMessage, on_unusable: Callable[[OutputUnusable], None]) -> None:
        """Handle a message of the front end; `on_unusable` gets those about bad outputs. Raises nothing."""
        try:
            if isinstance(message, SubmitRequest):
                self.submit(message)
            elif isinstance(message, AbortRequests):
                self.abort(message.request_ids, message.whole)
            else:
                on_unusable(message)
        except Exception as error:
            self._fail_one(message, error)

    @abstractmethod
    def submit(self, message: SubmitRequest) -> None:
        """Accept a new request, or a further chunk of a streaming-input session."""

    @abstractmethod
    def fail(self, message: SubmitRequest, error: OmniError) -> None:
        """End a request for which `submit` raised an error."""

    @abstractmethod
    def abort(self, request_ids: Sequence[str], whole: bool) -> None:
        """Abort requests, see `AbortRequests`. Unknown ids are ignored: those requests have ended."""

    @abstractmethod
    def accept_outputs(self, stage_id: int, accepted: Sequence[Accepted]) -> list[Any]:
        """Handle outputs of a stage; returns the outputs that go to AsyncLLM."""

    @abstractmethod
    def runs_ended(self, stage_id: int, ended: Sequence[RunEnded]) -> None:
        """Handle the runs that the stage's dispatcher has ended."""

    def close(self) -> None:
        for request_id in list(self.states):
            self._drop(request_id)

    def _drop(self, request_id: str) -> S | None:
        state = self.states.pop(request_id, None)
        if state is not None and state.ticket is not None and self._ticket_ended is not None:
            self._ticket_ended(state.ticket, state.answer_tokens)
        if not self.states and self._empty is not None and not self._empty.done():
            self._empty.set_result(None)
        return state

    def _fail_one(self, message: RequestMessage, error: Exception) -> None:
        """An error over one message must end at most the request of that message."""
        if not isinstance(message, SubmitRequest):
            logger.error("%r could not be handled.", message, exc_info=error)
            return
        logger.error("Request %s cannot be served.", message.request.request_id, exc_info=error)
        try:
            self.fail(message, OmniError(f"The request failed: {error!r}"))
        except Exception:
            logger.exception("The client of request %s could not be notified.", message.request.request_id)


def refuse(message: SubmitRequest, error: OmniError, put: Callable[[Any], None]) -> None:
    """End a request that cannot begin."""
    put(RequestFailed(message.request.request_id, error))
    if message.call is not None:
        message.call.put(PipelineCallEnded(error))
