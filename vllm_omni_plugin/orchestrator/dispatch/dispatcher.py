"""The runs of one stage: each goes to a replica, its outputs come back, and it moves when its replica is lost."""

import itertools
import secrets
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from vllm_omni_plugin.errors import (
    MessageTooLargeError,
    NoReplicaError,
    OmniError,
    ReplicaError,
    RequestLostError,
    RequestRefusedError,
)
from vllm_omni_plugin.orchestrator.dispatch.admission_gate import AdmissionGate
from vllm_omni_plugin.orchestrator.dispatch.head_queue import Choice, HeadQueue
from vllm_omni_plugin.orchestrator.dispatch.hold_queue import HoldQueue, MoveBudget
from vllm_omni_plugin.orchestrator.dispatch.outcomes import Outcomes
from vllm_omni_plugin.orchestrator.dispatch.paused_runs import PausedRuns
from vllm_omni_plugin.orchestrator.dispatch.returning_replicas import ReturningReplicas
from vllm_omni_plugin.orchestrator.dispatch.stall_watch import StallWatch
from vllm_omni_plugin.orchestrator.dispatch.suspects import Suspects
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics, WaitingCounts, count_reason
from vllm_omni_plugin.orchestrator.requests.stage_run import Loss, RunEnded, StageRun
from vllm_omni_plugin.vllm_api.requests.engine_types import Move

if TYPE_CHECKING:
    # It imports vLLM.
    from vllm_omni_plugin.vllm_api.requests.engine_api import EngineApi


class Dispatcher:
    """Assigns the runs of one stage to replicas, and sends them. Lives on the orchestrator's loop; nothing in it waits.

    The methods return the runs that have ended otherwise than by an output.

    Args:
        migration_limit: moves a request may make; losses with another culprit do not count.
        replica_wait: seconds that a request waits while no replica serves.
        moves: limits the moves of all stages.
        wake_at: asks for a call of `tick` at this time or before, in monotonic seconds.
        gate: None without admission control: then no run waits for room at a replica.
        has_upstream: see `PausedRuns`.

    Attributes:
        outcomes: accepts the outputs of the stage's replicas, and aborts runs.
    """

    def __init__(
        self,
        pool: StagePool,
        api: "EngineApi",
        migration_limit: int,
        replica_wait: float,
        clock: Callable[[], float],
        metrics: OrchestratorMetrics,
        moves: MoveBudget,
        wake_at: Callable[[float], None],
        gate: AdmissionGate | None,
        stalls: StallWatch,
        has_upstream: bool = False,
    ) -> None:
        self._pool = pool
        self._api = api
        self._migration_limit = migration_limit
        self._clock = clock
        self._metrics = metrics
        metrics.waiting_in[pool.stage_id] = lambda: WaitingCounts(
            len(self._held), len(self._paused), len(self._moving) + len(self._suspects)
        )
        self._wake_at = wake_at
        self._held = HoldQueue(replica_wait, wake_at)
        self._returning = ReturningReplicas(pool, wake_at, clock)
        self._moves = moves
        self._stalls = stalls
        # Runs of lost replicas, in the order of the losses.
        self._moving: dict[StageRun, None] = {}
        suspects = self._suspects = Suspects(pool, wake_at, clock)
        queue = self._queue = HeadQueue(pool, gate, metrics, clock, wake_at)
        metrics.queued_in[pool.stage_id] = lambda: len(queue.unsent)
        # Replicas that may have room, since a run has left them otherwise than by an output.
        self._freed: dict[PoolMember, None] = {}
        paused = self._paused = PausedRuns(pool, suspects, wake_at, clock, has_upstream)
        # Makes engine-side ids unique: several heads, or a head before and after its restart, may share an engine.
        tag = self._head_tag = secrets.token_hex(4)
        self._attempts = itertools.count(1)
        self.outcomes = Outcomes(
            pool, api, metrics, queue, paused, suspects, clock, tag, self._remove, self._send_waiting_later
        )

    @property
    def can_assign(self) -> bool:
        return bool(self._pool.serving)

    def submit(self, run: StageRun) -> Sequence[RunEnded]:
        if run.ticket is not None:
            self._queue.watch_deadline(run)
        # Behind those that are held.
        if self._returning.awaited and not run.request.abort_immediately and self._held.hold(run, self._clock()):
            self._assign_held()
        else:
            self._assign_and_send(run)
        return self.outcomes.take_ended()

    def add_chunk(self, run: StageRun, chunk: Any) -> Sequence[RunEnded]:
        """Add a chunk to a streaming-input session; a chunk that is not resumable closes the input."""
        session = run.streaming
        assert session is not None
        member = None if run.replica_id is None else self._pool.member(run.replica_id)
        run.add_chunk(chunk)
        if run.finished:
            self.outcomes.complete(run)
        if member is not None and run.sent:
            session.note_sent(chunk)
            self._stalls.input_sent(member, run, session)
            self._send(member, run, chunk)
        else:
            session.unsent.append(chunk)
        return self.outcomes.take_ended()

    def send_waiting(self, member: PoolMember) -> Sequence[RunEnded]:
        """Send what waits to a replica that may have room, after an output or a report of it."""
        if len(self._queue.unsent):
            self.outcomes.refuse_expired()
            self._send_waiting(member)
        return self.outcomes.take_ended()

    def recall_waiting(self, member: PoolMember) -> Sequence[RunEnded]:
        """A replica is cordoned: the runs that wait for it go to other replicas, if any serve."""
        for run in self._queue.unsent.runs_of(member):
            if self._pool.serving:
                self._recall(run)
        return self.outcomes.take_ended()

    def move(self, runs: Sequence[StageRun], lost: PoolMember, loss: Loss, engine_failed: bool) -> Sequence[RunEnded]:
        """A replica is lost, and these runs are no longer charged to it: each moves or fails.

        Runs that the replica had not got yet are assigned again, as if they had just come.

        Args:
            engine_failed: whether the engine crashed by itself or sent unusable messages: a request may be the cause.
        """
        if engine_failed and not self._pool.lockstep:
            self._suspects.engine_crashed(runs, loss)
        self._suspects.replica_lost(lost)
        for run in runs:
            self._queue.unsent.remove(run)
        self._assign_suspects()
        # Suspects first, so that the others can avoid the replicas where they are isolated; runs without outputs
        # before others, since most engines that crash because of a request do so at once.
        not_sent = []
        for run in sorted(runs, key=lambda run: (not run.crash_losses, run.has_output)):
            try:
                if run.sent:
                    self._move(run, lost, loss)
                else:
                    run.unassign()
                    not_sent.append(run)
            except Exception as error:
                self.outcomes.fail_unexpectedly(run, error)
        self._assign_moving()
        for run in not_sent:
            self._assign_and_send(run)
        return self.outcomes.take_ended()

    def assign_held(self) -> Sequence[RunEnded]:
        """A replica serves again: assign and send the held runs, in order, see `ReturningReplicas`."""
        self._returning.returned(len(self._held) + self._metrics.held_before_accept > 0)
        self._assign_held()
        self._assign_suspects()
        for member in self._pool.serving if len(self._queue.unsent) else ():
            self._send_waiting(member)
        return self.outcomes.take_ended()

    def tick(self) -> Sequence[RunEnded]:
        """Time has passed: refuse runs that have waited too long, and send others that may go on."""
        self.outcomes.refuse_expired()
        while (run := self._held.take_overdue(self._clock())) is not None:
            self._metrics.hold_time_seconds.observe(self._held.wait)
            if self._pool.serving and self._suspects.has_replica_for(run):
                # It was left to replicas that have not come back.
                self._assign_and_send(run)
            else:
                self._refuse(run, waited=self._held.wait)
        self._returning.tick()
        self._assign_held()
        self._assign_moving()
        self._assign_suspects()
        while (run := self._paused.take_ready()) is not None:
            self._assign_and_send(run)
        while self._freed:
            self._send_waiting(self._freed.popitem()[0])
        return self.outcomes.take_ended()

    def _assign_held(self) -> None:
        for run in list(self._held) if self._pool.serving else ():
            if not self._returning.may_assign:
                return
            # Sending may evict another run.
            if self._pool.serving and not run.ended and self._suspects.has_replica_for(run):
                self._held.remove(run)
                self._metrics.hold_time_seconds.observe(self._clock() - run.waiting_since)
                self._assign_and_send(run)

    def _send_waiting(self, member: PoolMember) -> None:
        """Send a replica the runs that wait for it, as far as it has room; then recall runs that wait for others."""
        next_is_in_share = self._queue.next_is_in_share(member)
        for run, request in self._queue.take_sendable(member, self._avoids):
            self._start(member, run, request)
        if next_is_in_share:
            # The replica has enough work. Runs that wait for others have more of their prompts cached there.
            return
        for run, chosen in self._queue.find_recalls(member, self._avoided):
            self._recall(run, chosen)

    def _send_waiting_later(self, member: PoolMember) -> None:
        """As `_send_waiting`, for callers that may be in the middle of sending other runs."""
        if len(self._queue.unsent):
            self._freed[member] = None
            self._wake_at(self._clock())

    def _recall(self, run: StageRun, chosen: Choice | None = None) -> None:
        """Assign a waiting run again, to the chosen replica or to the one that the pool chooses now."""
        self._queue.unsent.remove(run)
        self._pool.release(run)
        run.unassign()
        self._assign_and_send(run, chosen=chosen)

    def _assign_and_send(self, run: StageRun, may_wait: bool = True, chosen: Choice | None = None) -> None:
        """Assign a run to a replica, and send it or let it wait for that replica. Hold it if no replica serves."""
        if run.ticket is not None:
            self.outcomes.refuse_expired()
        if run.ended or (run.crash_losses and may_wait and self._suspects.hold(run)):
            return
        try:
            request = run.request if run.attempts or run.first_request is None else run.first_request
            if run.move is not Move.RESTART:
                request = self._api.continuation(request, run.move, run.produced)
            member = self._assign(run, request, chosen)
            if run.ticket is None or request.abort_immediately or not self._queue.must_wait(member, run):
                self._start(member, run, request)
            else:
                self._queue.enqueue(run, member, request, self._evict)
            if run.crash_losses:
                for waiting in self._queue.unsent.runs_of(member):
                    # They must not be there while the suspect is isolated.
                    if self._avoids(waiting, member):
                        self._recall(waiting)
        except NoReplicaError:
            self._hold(run)
        except (RequestRefusedError, RequestLostError) as error:
            self.outcomes.fail(run, error)
        except Exception as error:
            self.outcomes.fail_unexpectedly(run, error)

    def _evict(self, run: StageRun, error: RequestRefusedError) -> None:
        self.outcomes.fail(run, error)
        # The request that takes its place may be at another stage; then only `tick` returns the ended run.
        self._wake_at(self._clock())

    def _start(self, member: PoolMember, run: StageRun, request: Any) -> None:
        """Send a run to the replica that it is charged to. If that is dead, the run moves with the others there."""
        self._send(member, run, request)
        if run.ended or not run.sent:
            return
        if run.streaming is not None:
            for chunk in run.streaming.take_unsent():
                self._send(member, run, chunk)
        if request.abort_immediately:
            # vLLM submits such a request only for its clean-up in the engine, which sends no output for it.
            self.outcomes.complete(run)

    def _assign(self, run: StageRun, request: Any, chosen: Choice | None) -> PoolMember:
        if not run.task or run.move is not Move.RESTART:
            run.task, run.affinity_key = self._api.describe(request)
        if chosen is None:
            is_pinned = run.affinity_key is not None and self._api.how_to_move(request) is Move.PINNED
            may_avoid = run.crash_losses or self._suspects.isolated or self._paused.refused_by
            avoided = self._avoided(run) if may_avoid else ()
            if self._returning.awaited and run.affinity_key is None:
                avoided = self._returning.full.union(avoided)
            chosen = self._pool.decide(run.task, run.affinity_key, avoided, is_pinned)
            if run.ticket is not None:
                chosen = self._queue.prefer_headroom(run, chosen, avoided)
        member, decision = chosen
        attempt = f"{run.request_id}-{self._head_tag}-{next(self._attempts):x}"
        run.assign(member.replica_id, attempt, run.task, decision, self._clock())
        self._pool.charge(member, run)
        count_reason(self._metrics.decisions, (member.stage_id, self._pool.policy, decision.reason))
        if decision.fallback:
            count_reason(self._metrics.decision_fallbacks, (member.stage_id, self._pool.policy, decision.fallback))
        if run.crash_losses:
            self._suspects.assigned(run, member)
        return member

    def _avoided(self, run: StageRun) -> Collection[int]:
        """Ids of the replicas to which a run does not go while others serve.

        Raises:
            NoReplicaError: no replica serves to which the run may go.
        """
        refused = self._paused.refused_by.get(run, ())
        # A bound run finds the state that it needs at its replica only.
        isolating = run.crash_losses or (run.affinity_key is None and self._suspects.isolated)
        return self._suspects.avoided_replicas(run, refused) if isolating else refused

    def _avoids(self, run: StageRun, member: PoolMember) -> bool:
        avoided = self._avoided(run)
        return member.replica_id in avoided and any(other.replica_id not in avoided for other in self._pool.serving)

    def _send(self, member: PoolMember, run: StageRun, request: Any) -> None:
        assert member.client is not None
        try:
            member.client.add_request(request, run.engine_request_id)
            if not run.sent:
                self._note_sent(member, run)
        except MessageTooLargeError as error:
            self.outcomes.fail(run, error)
        except ReplicaError:
            # The client reports the loss in the loop's next turn, and with it every run charged to the replica.
            return
        except Exception as error:
            self.outcomes.fail_unexpectedly(run, OmniError(f"The request could not be encoded for the engine: {error}"))

    def _note_sent(self, member: PoolMember, run: StageRun) -> None:
        member.ledger.mark_sent(run)
        self._stalls.asked(member, run)
        if run.ticket is not None:
            self._queue.mark_sent(run)
        if run.first_sent_at is None:
            run.first_sent_at = self._clock()
            self._metrics.queue_time_seconds.observe(run.first_sent_at - run.submitted_at)
        if run.chosen_replicas is not None and not run.produced:
            run.chosen_replicas.append((member.name, run.decision))

    def _hold(self, run: StageRun) -> None:
        # `abort_immediately` is for a clean-up in the engine, and there is none.
        if run.request.abort_immediately or not self._held.hold(run, self._clock()):
            self._refuse(run, waited=0.0)

    def _refuse(self, run: StageRun, waited: float) -> None:
        self.outcomes.fail(run, run.fail_without_replica(self._pool.unavailable(waited)), refused=True)

    def _move(self, run: StageRun, lost: PoolMember, loss: Loss) -> None:
        move = self._api.how_to_move(run.request)
        error = run.lose_replica(loss, self._migration_limit, move, self._api.vocabulary)
        if error is not None:
            self.outcomes.fail(run, error)
        elif not self._end_if_complete(run, lost):
            self._metrics.request_moves[run.move] += 1
            if run.ticket is not None:
                self._queue.watch_deadline(run)
            self._moving[run] = None

    def _assign_moving(self) -> None:
        while self._moving and self._moves.spend():
            run = next(iter(self._moving))
            del self._moving[run]
            self._assign_and_send(run)
        if self._moving:
            self._wake_at(self._moves.next_at)

    def _assign_suspects(self) -> None:
        while (run := self._suspects.take_ready()) is not None:
            self._assign_and_send(run, may_wait=False)

    def _end_if_complete(self, run: StageRun, lost: PoolMember) -> bool:
        """End a run of which only the last output was missing. Returns whether it was one."""
        outputs = self._api.end_if_complete(run.request, run.produced, lost.engine_index)
        # A session's parameters bound a turn, and not the whole answer.
        if outputs is None or run.streaming is not None:
            return False
        self.outcomes.complete(run, outputs)
        return True

    def _remove(self, run: StageRun) -> None:
        self._moving.pop(run, None)
        self._held.remove(run)
        if run.ticket is not None:
            self._queue.run_ended(run)
        if run.crash_losses:
            self._suspects.remove(run)
        self._paused.remove(run)
