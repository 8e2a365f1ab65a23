"""What the orchestrator asks of those who see requests through their stages."""

from collections.abc import Sequence
from typing import Any, Protocol

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.orchestrator.dispatcher import RunListener
from vllm_omni_plugin.orchestrator.messages import SubmitRequest
from vllm_omni_plugin.orchestrator.stage_run import StageRun
from vllm_omni_plugin.orchestrator.unfinished import UnfinishedRequests


class Requests(RunListener, Protocol):
    """All unfinished requests; `SingleStage` and `Conductor` in service. Nothing in it blocks."""

    @property
    def states(self) -> UnfinishedRequests[Any]:
        """By the client's id; each an `OrchestratorRequestState`."""

    def submit(self, message: SubmitRequest) -> None:
        """Take a new request, or a further chunk of a streaming-input session."""

    def fail(self, message: SubmitRequest, error: OmniError) -> None:
        """End a request that `submit` raised an error of, whatever of it has begun."""

    def abort(self, request_ids: Sequence[str], whole: bool) -> None:
        """The client does not want these any more; see `AbortRequests`. Unknown ids are those that have just ended."""

    def take(self, stage_id: int, run: StageRun, output: Any) -> Any | None:
        """A stage has put something out, which `Dispatcher.accept` has accepted.

        Returns:
            What of it goes to vLLM's server, None for nothing.
        """

    def close(self) -> None:
        """Give up what still waits. Idempotent."""
