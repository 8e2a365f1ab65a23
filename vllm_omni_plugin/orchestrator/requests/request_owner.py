"""The unfinished requests, and what the orchestrator asks of those who see them through their stages."""

import asyncio
from collections.abc import Sequence
from typing import Any, Generic, Protocol, TypeVar

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import SubmitRequest
from vllm_omni_plugin.orchestrator.requests.run_events import Accepted, RunEvent

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


class Requests(Protocol):
    """Owns all unfinished requests; `SingleStage` and `PipelineRequests` in service. Nothing in it blocks."""

    @property
    def states(self) -> RequestTable[Any]:
        """By the client's id; each an `OrchestratorRequestState`."""

    def submit(self, message: SubmitRequest) -> None:
        """Take a new request, or a further chunk of a streaming-input session."""

    def fail(self, message: SubmitRequest, error: OmniError) -> None:
        """End a request that `submit` raised an error of, whatever of it has begun."""

    def abort(self, request_ids: Sequence[str], whole: bool) -> None:
        """The client does not want these any more; see `AbortRequests`. Unknown ids are those that have just ended."""

    def take(self, stage_id: int, accepted: Sequence[Accepted]) -> list[Any]:
        """A stage has put something out.

        Returns:
            The outputs that go to vLLM's server.
        """

    def handle(self, stage_id: int, events: Sequence[RunEvent]) -> None:
        """What the stage's dispatcher returned."""

    def close(self) -> None:
        """Give up what still waits. Idempotent."""
