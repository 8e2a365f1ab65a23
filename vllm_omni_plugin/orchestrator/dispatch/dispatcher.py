"""The requests of one stage: each goes to a replica, its outputs come back, and it moves when its replica is lost."""

import itertools
import secrets
from collections.abc import Callable, Iterable, Sequence
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
from vllm_omni_plugin.orchestrator.dispatch.suspects import Suspects
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics, WaitingCounts, count_reason
from vllm_omni_plugin.orchestrator.requests.stage_run import Accepted, Loss, RunEnded, StageRun
from vllm_omni_plugin.vllm_api.requests.engine_types import Move

if TYPE_CHECKING:
    # Imports vLLM, which nothing here does.
    from vllm_omni_plugin.vllm_api.requests.engine_api import EngineApi


class Dispatcher:
    """Sees to the runs of one stage. Lives on the orchestrator's loop; nothing in it waits for anything.

    Runs that end otherwise than by an output of theirs are returned by the method in which that happened.

    Args:
        pool: the stage's replicas.
        api: see `EngineApi`.
        migration_limit: moves a request may make, without those for which another one is to blame.
        replica_wait: seconds that a request waits while no replica serves.
        clock: monotonic seconds.
        metrics: what it counts.
        moves: how many requests of lost replicas may go on.
        wake_at: asks for a call of `tick` at this time or before, in monotonic seconds.
        gate: see `HeadQueue`.
        fed: see `PausedRuns`.

    Attributes:
        queue: what waits for its replica.
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
        gate: AdmissionGate,
        fed: bool = False,
    ) -> None:
        self._pool = pool
        self._api = api
        self._migration_limit = migration_limit
        self._clock = clock
        self._metrics = metrics
        metrics.waiting_in[pool.stage_id] = lambda: WaitingCounts(
            len(self._held), len(self._refused), len(self._moving) + len(self._suspects)
        )
        self._wake_at = wake_at
        self._held = HoldQueue(replica_wait, wake_at)
        self._moves = moves
        # In the order of their losses.
        self._moving: dict[StageRun, None] = {}
        # Those of lost replicas that had not got them; only while `_dispatch_moving` runs.
        self._unsent: dict[StageRun, None] = {}
        self._is_moving = False
        self._suspects = Suspects(pool, wake_at, clock)
        self.queue = HeadQueue(pool, gate, metrics, clock, wake_at)
        metrics.queued_in[pool.stage_id] = lambda: len(self.queue)
        # Replicas that may have room since something left them otherwise than by an output.
        self._freed: dict[PoolMember, None] = {}
        self._refused = PausedRuns(pool, self._suspects, wake_at, clock, fed)
        # Two heads may share an engine, and so may one head before and after its restart: ids must not meet there.
        self._head_tag = secrets.token_hex(4)
        self._attempts = itertools.count(1)
        self._outcomes = Outcomes(
            pool, api, metrics, self.queue, self._refused, self._head_tag, self._forget, self._fill_later
        )

    @property
    def can_dispatch(self) -> bool:
        """Whether a replica takes requests now."""
        return bool(self._pool.serving)

    def submit(self, run: StageRun) -> Sequence[RunEnded]:
        """Take a new run. There must be no other one of the same request."""
        self.queue.must_start(run)
        self._dispatch(run)
        return self._outcomes.take_ended()

    def add_chunk(self, run: StageRun, chunk: Any) -> Sequence[RunEnded]:
        """A further chunk of a streaming-input session was submitted; one that is not resumable closes the input."""
        session = run.streaming
        assert session is not None
        member = None if run.replica_id is None else self._pool.member(run.replica_id)
        run.add_chunk(chunk)
        waits = run in self.queue
        if run.finished:
            self._outcomes.complete(run)
        if member is not None and not waits:
            session.note_sent(chunk)
            self._send(member, run, chunk)
        else:
            session.unsent.append(chunk)
        return self._outcomes.take_ended()

    def has_room(self, member: PoolMember) -> Sequence[RunEnded]:
        """An output or a report of a replica has been dealt with: what waits may go there."""
        if len(self.queue):
            self._fill(member)
        return self._outcomes.take_ended()

    def held_back(self, member: PoolMember) -> Sequence[RunEnded]:
        """A replica gets no new requests. Those that wait for it go elsewhere, or to it if there is no other one."""
        for run in self.queue.waiting_for(member):
            # The one before may have found that the others are dead.
            if self._pool.serving:
                self._recall(run)
        return self._outcomes.take_ended()

    def abort(self, runs: Iterable[StageRun]) -> None:
        """Forget these runs and tell their replicas. Nothing to do for those that have ended."""
        self._outcomes.abort(runs)

    def accept(self, member: PoolMember, outputs: Iterable[Any]) -> tuple[list[Accepted], Sequence[RunEnded]]:
        """A message came from a replica. Returns also what of it is to be delivered, see `Outcomes.accept`."""
        accepted = self._outcomes.accept(member, outputs)
        if member.replica_id in self._suspects.tries:
            self._suspects.heard(member, accepted)
        return accepted, self._outcomes.take_ended()

    def move(self, runs: Sequence[StageRun], lost: PoolMember, loss: Loss, engine_failed: bool) -> Sequence[RunEnded]:
        """These requests' replica is lost, and they are no longer charged to it: each moves or fails.

        Those that it had not got yet go on as if they had just come.

        Args:
            runs: the requests.
            lost: the replica.
            loss: of the replica.
            engine_failed: whether its engine crashed by itself or said what cannot be used: a request may be the cause.
        """
        if engine_failed and not self._pool.lockstep:
            self._suspects.engine_failed(runs, loss)
        self._suspects.lost(lost)
        for run in runs:
            self.queue.leave(run)
        self._dispatch_suspects()
        # Suspects first, so that the others can avoid the replicas where they are tried. Most engines that die of a
        # request do so at once.
        for run in sorted(runs, key=lambda run: (not run.crash_losses, run.has_output)):
            try:
                if run.sent:
                    self._move(run, lost, loss)
                else:
                    run.undo_dispatch()
                    self._unsent[run] = None
            except Exception as error:
                self._outcomes.give_up(run, error)
        self._dispatch_moving()
        return self._outcomes.take_ended()

    def replica_serves(self) -> Sequence[RunEnded]:
        """A replica takes new requests: dispatch what was held, in order."""
        for run in list(self._held):
            # Where one is sent may turn out to be dead, and one may push out another.
            if self._pool.serving and not run.closed and self._suspects.can_go(run):
                self._held.remove(run)
                self._metrics.hold_time.observe(self._clock() - run.waiting_since)
                self._dispatch(run)
        self._dispatch_suspects()
        for member in self._pool.serving if len(self.queue) else ():
            self._fill(member)
        return self._outcomes.take_ended()

    def tick(self) -> Sequence[RunEnded]:
        """Time has passed, as `wake_at` was told: refuse what has waited in vain, and let others go on."""
        while (run := self._held.take_overdue(self._clock())) is not None:
            self._metrics.hold_time.observe(self._held.wait)
            self._refuse(run, waited=self._held.wait)
        for run, error in self.queue.overdue():
            self._outcomes.fail(run, error)
        self._dispatch_moving()
        self._dispatch_suspects()
        while (run := self._refused.take()) is not None:
            self._dispatch(run)
        while self._freed:
            self._fill(self._freed.popitem()[0])
        return self._outcomes.take_ended()

    def _fill(self, member: PoolMember) -> None:
        """Send a replica what waits for it, as far as it has room; or what waits for others, if that is better."""
        has_own = self.queue.has_own(member)
        for run, request in self.queue.ready(member, self._refused.avoids):
            self._start(member, run, request)
        if has_own:
            # It has enough to do; what waits for others has more of its prompt there, or will have.
            return
        for run, chosen in self.queue.recalls(member, self._refused.avoided):
            self._recall(run, chosen)

    def _fill_later(self, member: PoolMember) -> None:
        """As `_fill`, for whoever may be in the middle of sending other requests."""
        if len(self.queue):
            self._freed[member] = None
            self._wake_at(self._clock())

    def _recall(self, run: StageRun, chosen: Choice | None = None) -> None:
        """A request that waits for its replica goes to another one, or looks for one."""
        self.queue.leave(run)
        self._pool.release(run)
        run.undo_dispatch()
        self._dispatch(run, chosen=chosen)

    def _dispatch(self, run: StageRun, may_wait: bool = True, chosen: Choice | None = None) -> None:
        """Send a request to the replica its pool picks, or let it wait for that one, or hold it."""
        if run.crash_losses and may_wait and self._suspects.hold(run):
            return
        try:
            request = run.request if run.attempts or run.first_request is None else run.first_request
            if run.move is not Move.RESTART:
                request = self._api.continuation(request, run.move, run.produced)
            member = self._choose(run, request, chosen)
            if request.abort_immediately or not self.queue.must_wait(member, run):
                self._start(member, run, request)
            else:
                self.queue.wait(run, member, request, self._push_out)
            if run.crash_losses:
                for waiting in self.queue.waiting_for(member):
                    # It is not to be there while the other one is on trial.
                    if self._refused.avoids(waiting, member):
                        self._recall(waiting)
        except NoReplicaError:
            self._hold(run)
        except (RequestRefusedError, RequestLostError) as error:
            self._outcomes.fail(run, error)
        except Exception as error:
            self._outcomes.give_up(run, error)

    def _push_out(self, run: StageRun, error: RequestRefusedError) -> None:
        self._outcomes.fail(run, error)
        # What takes its place may be at another stage, and then nobody asks here what has ended.
        self._wake_at(self._clock())

    def _start(self, member: PoolMember, run: StageRun, request: Any) -> None:
        """Send a request to the replica that it is charged to; on to the next if that one turns out to be dead."""
        attempt = run.engine_request_id
        self._send(member, run, request)
        if run.closed or run.engine_request_id != attempt:
            # The replica turned out to be dead, so the request has moved, or waits with all that has not been sent.
            return
        if run.streaming is not None:
            for chunk in run.streaming.take_unsent():
                self._send(member, run, chunk)
        if request.abort_immediately:
            # vLLM submits such a request only for the clean-up it causes in the engine, which never answers it.
            self._outcomes.complete(run)

    def _choose(self, run: StageRun, request: Any, chosen: Choice | None) -> PoolMember:
        """The replica of the next attempt, which is charged with it from here on."""
        if not run.task or run.move is not Move.RESTART:
            run.task, run.affinity_key = self._api.describe(request)
        if chosen is None:
            stays = run.affinity_key is not None and self._api.how_to_move(request) is Move.PINNED
            avoided = self._refused.avoided(run)
            chosen = self._pool.decide(run.task, run.affinity_key, avoided, stays)
            chosen = self.queue.soonest(run, chosen, avoided)
        member, decision = chosen
        attempt = f"{run.request_id}-{self._head_tag}-{next(self._attempts):x}"
        run.dispatch(member.replica_id, attempt, run.task, decision, self._clock())
        self._pool.charge(member, run)
        count_reason(self._metrics.decisions, (member.stage_id, self._pool.policy, decision.reason))
        if decision.fallback:
            count_reason(self._metrics.fallbacks, (member.stage_id, self._pool.policy, decision.fallback))
        if run.crash_losses:
            self._suspects.begin(run, member)
        return member

    def _send(self, member: PoolMember, run: StageRun, request: Any) -> None:
        if run.replica_id != member.replica_id or member.client is None:
            # An earlier chunk of the same session was the last that could be sent.
            return
        try:
            member.client.add_request(request, run.engine_request_id)
            if not run.sent:
                self._note_sent(member, run)
        except MessageTooLargeError as error:
            self._outcomes.fail(run, error)
        except ReplicaError:
            # The client has reported its death meanwhile, and with it every request charged to the replica.
            return
        except Exception as error:
            self._outcomes.give_up(run, OmniError(f"The request could not be encoded for the engine: {error}"))

    def _note_sent(self, member: PoolMember, run: StageRun) -> None:
        member.ledger.mark_sent(run)
        self.queue.started(run)
        if run.dispatched_at is None:
            run.dispatched_at = self._clock()
            self._metrics.queue_time.observe(run.dispatched_at - run.submitted_at)
        if run.dispatches is not None and not run.produced:
            run.dispatches.append((member.name, run.decision))

    def _hold(self, run: StageRun) -> None:
        # Without an engine there is nothing to clean up either.
        if run.request.abort_immediately or not self._held.hold(run, self._clock()):
            self._refuse(run, waited=0.0)

    def _refuse(self, run: StageRun, waited: float) -> None:
        self._outcomes.fail(run, run.fail_without_replica(self._pool.unavailable(waited)), refused=True)

    def _move(self, run: StageRun, lost: PoolMember, loss: Loss) -> None:
        move = self._api.how_to_move(run.request)
        error = run.lose_replica(loss, self._migration_limit, move, self._api.vocabulary)
        if error is not None:
            self._outcomes.fail(run, error)
        elif not self._end_if_whole(run, lost):
            self._metrics.moves_by_way[run.move] += 1
            self.queue.must_start(run)
            self._moving[run] = None

    def _dispatch_moving(self) -> None:
        # The next replica may turn out to be dead, too; then its requests come in here and have their turn below.
        if self._is_moving:
            return
        self._is_moving = True
        try:
            # Those of whom some are suspects first, as above.
            while line := self._moving if self._moving and self._moves.take() else self._unsent:
                run = next(iter(line))
                del line[run]
                self._dispatch(run)
        finally:
            self._is_moving = False
            if self._moving:
                self._wake_at(self._moves.next_at)

    def _dispatch_suspects(self) -> None:
        while (run := self._suspects.next_free()) is not None:
            self._dispatch(run, may_wait=False)

    def _end_if_whole(self, run: StageRun, lost: PoolMember) -> bool:
        """End a lost request of which only the end was missing. Returns whether it was one."""
        outputs = self._api.end_if_complete(run.request, run.produced, lost.engine_index)
        # The parameters of a session bound a turn and not the whole.
        if outputs is None or run.streaming is not None:
            return False
        self._outcomes.complete(run, outputs)
        return True

    def _forget(self, run: StageRun) -> None:
        """A run has ended."""
        self._moving.pop(run, None)
        self._unsent.pop(run, None)
        self._held.remove(run)
        self.queue.ended(run)
        if run.crash_losses:
            self._suspects.forget(run)
        self._refused.forget(run)
