"""What comes of the runs of one stage: outputs that are new to their clients, and ends of other kinds, each once."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_omni_plugin.errors import OmniError, ReplicaError, RequestLostError, RequestRefusedError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.dispatch.head_queue import HeadQueue
from vllm_omni_plugin.orchestrator.dispatch.paused_runs import PausedRuns
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics, count_reason
from vllm_omni_plugin.orchestrator.requests.stage_run import Accepted, RequestPhase, RunEnded, StageRun

if TYPE_CHECKING:
    # Imports vLLM, which nothing here does.
    from vllm_omni_plugin.vllm_api.requests.engine_api import EngineApi

logger = init_logger(__name__)


class Outcomes:
    """Takes in what replicas say of runs, and ends runs. A part of `Dispatcher`.

    Args:
        pool: the stage's replicas.
        api: see `EngineApi`.
        metrics: what it counts.
        queue: of the stage.
        refused: of the stage.
        head_tag: what the engine-side ids of this head have in them, and no others.
        forget: lets go of a run wherever it may wait.
        freed: told of each replica where something was aborted.
    """

    def __init__(
        self,
        pool: StagePool,
        api: "EngineApi",
        metrics: OrchestratorMetrics,
        queue: HeadQueue,
        refused: PausedRuns,
        head_tag: str,
        forget: Callable[[StageRun], None],
        freed: Callable[[PoolMember], None],
    ) -> None:
        self._pool = pool
        self._api = api
        self._metrics = metrics
        self._queue = queue
        self._refused = refused
        self._head_tag = head_tag
        self._forget = forget
        self._freed = freed
        self._ended: list[RunEnded] = []

    def accept(self, member: PoolMember, outputs: Iterable[Any]) -> list[Accepted]:
        """A message came from a replica.

        Returns:
            What of it is to be delivered: outputs of current attempts that have not been delivered yet, under the
            client's ids. What is finished is released, anything else dropped.
        """
        accepted = []
        for output in outputs:
            run = member.in_flight.get(output.request_id)
            if run is None:
                if self._head_tag not in output.request_id and output.finish_reason is None:
                    # Another head has left it behind, and nobody else would end it.
                    self._abort_at(member, [output.request_id])
                continue
            output.request_id = run.request_id
            try:
                if run.phase is RequestPhase.STREAMING and output.finish_reason is None:
                    # Most outputs are in the middle of an answer.
                    member.ledger.add_tokens(run, len(output.new_token_ids))
                    run.produced.extend(output.new_token_ids)
                elif not self._take(member, run, output):
                    continue
                accepted.append((run, output))
            except Exception as error:
                self.give_up(run, error)
        return accepted

    def take_ended(self) -> Sequence[RunEnded]:
        """Those that have ended otherwise than by an output or an abort, since this was asked last."""
        if not self._ended:
            return ()
        ended, self._ended = self._ended, []
        return ended

    def abort(self, runs: Iterable[StageRun]) -> None:
        """End these runs and tell their replicas. Nothing to do for those that have ended."""
        by_member: dict[PoolMember, list[str]] = {}
        for run in [run for run in runs if not run.closed]:
            if run.replica_id is not None and run.sent:
                by_member.setdefault(self._pool.member(run.replica_id), []).append(run.engine_request_id)
            self._end(run)
        for member, engine_request_ids in by_member.items():
            self._abort_at(member, engine_request_ids)
            self._freed(member)

    def complete(self, run: StageRun, outputs: Any | None = None) -> None:
        """A run is over without a last output of its engine; see `RunEnded`."""
        self._end(run)
        self._ended.append(RunEnded(run, outputs))

    def fail(self, run: StageRun, error: OmniError, refused: bool = False) -> None:
        """End a run with an error, unless it has ended; its engine may have some of it.

        Args:
            run: the run.
            error: for its client.
            refused: whether it is that no replica serves.
        """
        if run.closed:
            return
        if isinstance(error, RequestRefusedError):
            count_reason(self._metrics.refusals, (self._pool.stage_id, error.reason, str(error.status)))
        elif refused or isinstance(error, RequestLostError):
            self._metrics.count_failure(error, refused)
        self.abort((run,))
        self._ended.append(RunEnded(run, error=error))

    def give_up(self, run: StageRun, error: Exception) -> None:
        """What is wrong with one request, or with our handling of it, ends that request and nothing else."""
        logger.error("Request %s is given up: %s", run.request_id, error, exc_info=error)
        self.fail(run, error if isinstance(error, OmniError) else OmniError(f"The request failed: {error!r}"))

    def _take(self, member: PoolMember, run: StageRun, output: Any) -> bool:
        """Take in an output of a current attempt. Returns whether it is to be delivered."""
        tokens, finished = output.new_token_ids, output.finish_reason is not None
        cut_short = finished and self._api.cut_short(output)
        if cut_short and self._goes_on_elsewhere(member, run, output):
            return False
        if not (run.has_output or cut_short):
            self._begin(member, run, output)
        # Counted whether the client gets it or not.
        member.ledger.add_tokens(run, len(tokens))
        if run.skipping_delivered and not self._fit(run, output, cut_short):
            return False
        run.deliver(output.new_token_ids, finished, cut_short)
        if finished and run.finished:
            self._end(run)
        return True

    def _goes_on_elsewhere(self, member: PoolMember, run: StageRun, output: Any) -> bool:
        """An engine has cut a request short. Returns whether it has only refused it, and another may take it."""
        if run.streaming is not None:
            # Chunks that were on their way begin the session anew there, and nobody would end that.
            self._abort_at(member, [run.engine_request_id])
        may_move = not run.has_output and self._api.refused(output) and not self._api.transfers_cache(run.request)
        if not may_move or not self._refused.refuse(run, member):
            return False
        self._queue.must_start(run)
        return True

    def _begin(self, member: PoolMember, run: StageRun, output: Any) -> None:
        cached_tokens = self._api.cached_tokens(output)
        self._pool.begin(member, run, cached_tokens)
        if cached_tokens is not None:
            self._metrics.matched_tokens += run.decision.matched_tokens
            self._metrics.cached_tokens += cached_tokens

    def _fit(self, run: StageRun, output: Any, cut_short: bool) -> bool:
        """Fit output of a moved request to what was delivered before. Returns whether anything of it is new."""
        tokens, finished = output.new_token_ids, output.finish_reason is not None
        try:
            swallow = len(tokens) if cut_short else run.skip_delivered(tokens, finished)
        except RequestLostError as error:
            self._metrics.diverged += 1
            self.fail(run, error)
            return False
        self._metrics.swallowed_tokens += swallow
        if run.finished:
            # The last turn of a session, of which nothing was missing.
            self.complete(run)
            return False
        if run.skipping_delivered and not cut_short:
            return False
        self._api.trim_repeated(output, swallow)
        return True

    def _abort_at(self, member: PoolMember, engine_request_ids: Sequence[str]) -> None:
        # A replica that turns out to be dead has nothing left to abort.
        with suppress(ReplicaError):
            if member.client is not None:
                member.client.abort_requests(engine_request_ids)

    def _end(self, run: StageRun) -> None:
        run.abort()
        run.closed = True
        self._pool.release(run)
        self._forget(run)
