"""Accepts the outputs of the runs of one stage, and ends runs."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from vllm_omni_plugin.errors import OmniError, ReplicaError, RequestLostError, RequestRefusedError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadContext
from vllm_omni_plugin.orchestrator.dispatch.suspects import Suspects
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.counters import count_reason
from vllm_omni_plugin.orchestrator.requests.stage_run import Accepted, RequestPhase, RunEnded, StageRun

if TYPE_CHECKING:
    # It imports vLLM.
    from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi

logger = init_logger(__name__)


class Runs(Protocol):
    """Where runs are that no replica has: the `Dispatcher`."""

    def refused(self, run: StageRun, member: PoolMember) -> bool:
        """A paused engine has refused a run. Returns whether it waits there, or its client gets the refusal."""

    def cache_missed(self, run: StageRun, member: PoolMember) -> None:
        """The engine of a decode could not fetch the cache that a prefill has left."""

    def run_ended(self, run: StageRun) -> None: ...

    def may_have_room(self, member: PoolMember) -> None:
        """Runs were aborted at a replica."""

    def apart_changed(self, replica_id: int) -> None:
        """Suspects that are kept apart at a replica have got tokens."""


class RunFinisher:
    """Accepts outputs of replicas, and ends runs, each once. A part of `Dispatcher`."""

    def __init__(self, *, pool: StagePool, api: "EngineApi", head: HeadContext, suspects: Suspects, runs: Runs) -> None:
        self._pool = pool
        self._api = api
        self._head = head
        self._clock = head.clock
        self._tag = head.tag
        self._metrics = head.metrics
        self._suspects = suspects
        self._runs = runs
        self._ended: list[RunEnded] = []
        # Whether a request goes on without what fails here.
        self.is_optional = False
        # Called with the id and transfer parameters of the last output of an attempt whose run has ended before.
        self.on_late_end: Callable[[str, Any], None] = lambda request_id, params: None

    def accept(self, member: PoolMember, outputs: Iterable[Any]) -> tuple[list[Accepted], Sequence[RunEnded]]:
        """Accept the outputs of a message of a replica, and release finished runs.

        Returns what is new to clients, of current attempts and under the client's ids; and the runs that have ended
        otherwise, see `take_ended`.
        """
        accepted = []
        answered: StageRun | None = None
        find, streaming, streamed = member.in_flight.get, RequestPhase.STREAMING, 0
        for output in outputs:
            run = find(output.request_id)
            if run is None:
                if output.finish_reason is not None:
                    self.on_late_end(output.request_id, output.kv_transfer_params)
                elif self._tag not in output.request_id:
                    # It belongs to a head that is gone, and no other process would end it.
                    self.abort_at(member, [output.request_id])
                continue
            answered = run
            output.request_id = run.request_id
            try:
                if run.phase is streaming and output.finish_reason is None:
                    # Most outputs are in the middle of an answer.
                    tokens = output.new_token_ids
                    run.produced.extend(tokens)
                    run.output_tokens += len(tokens)
                    streamed += len(tokens)
                elif not self._accept_output(member, run, output):
                    continue
                accepted.append((run, output))
            except Exception as error:
                self.fail_unexpectedly(run, error)
        if answered is not None:
            member.ledger.add_tokens(streamed, decoding=True)
            # In this place, since a call for each message costs more.
            progress, now = member.progress, self._clock()
            progress.longest_gap = max(progress.longest_gap, now - max(progress.since, answered.asked_at))
            progress.since, progress.highest_kv_usage = now, 0.0
        if member.replica_id in self._suspects.apart:
            self._runs.apart_changed(member.replica_id)
        return accepted, self.take_ended() if self._ended else ()

    def take_ended(self) -> Sequence[RunEnded]:
        """The runs that have ended otherwise than by an output or an abort, since the last call."""
        if not self._ended:
            return ()
        ended, self._ended = self._ended, []
        return ended

    def abort(self, runs: Iterable[StageRun]) -> None:
        """End these runs, and abort them at their replicas. Ignores runs that have ended."""
        by_member: dict[PoolMember, list[str]] = {}
        for run in [run for run in runs if not run.ended]:
            if run.replica_id is not None and run.sent:
                by_member.setdefault(self._pool.member(run.replica_id), []).append(run.engine_request_id)
            self._end(run)
        for member, engine_request_ids in by_member.items():
            self.abort_at(member, engine_request_ids)
            self._runs.may_have_room(member)

    def complete(self, run: StageRun, outputs: Any | None = None) -> None:
        """End a run without a last output of its engine; see `RunEnded`."""
        self._end(run)
        self._ended.append(RunEnded(run, outputs))

    def complete_if_whole(self, run: StageRun, lost: PoolMember) -> bool:
        """End a run of a lost replica of which only the last output was missing. Returns whether it was one."""
        outputs = self._api.end_if_complete(run.request, run.produced, lost.engine_index)
        # A session's parameters bound a turn, and not the whole answer.
        if outputs is None or run.streaming is not None:
            return False
        self.complete(run, outputs)
        return True

    def refuse(self, run: StageRun, waited: float) -> None:
        """End a run that has waited for a replica in vain, or may not wait."""
        why = f"the request waited {waited:.0f} s" if waited else ""
        self.fail(run, run.fail_without_replica(self._pool.unavailable(why)), refused=True)

    def expire(self, run: StageRun) -> None:
        """End a run whose deadline has passed, and that no engine has."""
        assert self._head.gate is not None
        assert run.ticket is not None
        self.fail(run, self._head.gate.expire(run.ticket))

    def fail(self, run: StageRun, error: OmniError, refused: bool = False) -> None:
        """End a run with an error, unless it has ended; its engine may have it. `refused`: no replica serves."""
        if run.ended:
            return
        # No client gets the error of a prefill, or of a clean-up.
        is_needed = not (self.is_optional or run.request.abort_immediately)
        if isinstance(error, RequestRefusedError):
            count_reason(self._metrics.requests_refused, (self._pool.stage_id, error.reason, str(error.status)))
        elif is_needed and (refused or isinstance(error, RequestLostError)):
            self._metrics.count_failure(error, refused)
        self.abort((run,))
        self._ended.append(RunEnded(run, error=error))

    def fail_unexpectedly(self, run: StageRun, error: Exception) -> None:
        """End one run for an error that was not expected; other runs go on."""
        logger.error("Request %s has failed: %s", run.request_id, error, exc_info=error)
        self.fail(run, error if isinstance(error, OmniError) else OmniError(f"The request failed: {error!r}"))

    def _accept_output(self, member: PoolMember, run: StageRun, output: Any) -> bool:
        """Count an output; False if the client does not get it: tried elsewhere, or a repetition."""
        tokens, finished = output.new_token_ids, output.finish_reason is not None
        cut_short = finished and self._api.cut_short(output)
        if cut_short and self._retries_elsewhere(member, run, output):
            return False
        if not (run.has_output or cut_short):
            self._note_first_output(member, run, output)
        # Counted even if the client has these tokens already.
        run.output_tokens += len(tokens)
        member.ledger.add_tokens(len(tokens), decoding=run.has_output)
        if run.skipping_delivered and not self._skip_delivered(run, output, cut_short):
            return False
        run.deliver(output.new_token_ids, finished, cut_short)
        if finished and run.finished:
            self._end(run)
        return True

    def _retries_elsewhere(self, member: PoolMember, run: StageRun, output: Any) -> bool:
        """An engine has cut a run short. Returns whether it goes on: the engine has refused it, or missed a cache."""
        if run.streaming is not None:
            # Chunks on their way would begin the session anew there, and nothing would end it.
            self.abort_at(member, [run.engine_request_id])
        if not self._api.refused(output):
            missed = run.awaits_cache and not self._api.aborted(output)
            if missed:
                self._runs.cache_missed(run, member)
            return missed
        may_move = not run.has_output and not self._api.transfers_cache(run.request)
        return may_move and self._runs.refused(run, member)

    def _note_first_output(self, member: PoolMember, run: StageRun, output: Any) -> None:
        """A first output ends a pause, and tells how much of the prompt was cached."""
        refusals = self._pool.refusals
        if refusals.tried:
            refusals.accepted(self._clock())
            self._head.wake_at(refusals.next_try_at)
        cached_tokens = self._api.cached_tokens(output)
        self._pool.add_first_output(member, run, cached_tokens)
        if cached_tokens is not None:
            self._metrics.matched_tokens += run.decision.matched_tokens
            self._metrics.cached_tokens += cached_tokens

    def _skip_delivered(self, run: StageRun, output: Any, cut_short: bool) -> bool:
        """Remove what was delivered before from an output of a moved run. Returns whether anything of it is new."""
        tokens, finished = output.new_token_ids, output.finish_reason is not None
        try:
            skip = len(tokens) if cut_short else run.skip_delivered(tokens, finished)
        except RequestLostError as error:
            self._metrics.replays_diverged += 1
            self.fail(run, error)
            return False
        self._metrics.tokens_swallowed += skip
        if run.finished:
            # It was the last turn of a session, and all of it was delivered.
            self.complete(run)
            return False
        if run.skipping_delivered and not cut_short:
            return False
        self._api.trim_repeated(output, skip)
        return True

    def abort_at(self, member: PoolMember, engine_request_ids: Sequence[str]) -> None:
        """Abort attempts at a replica, which stay charged to it."""
        # A dead replica has nothing to abort.
        with suppress(ReplicaError):
            if member.client is not None:
                member.client.abort_requests(engine_request_ids)

    def _end(self, run: StageRun) -> None:
        run.end()
        self._pool.release(run)
        self._runs.run_ended(run)
