"""The requests of one stage: each goes to a replica, its outputs come back, and it moves when its replica is lost."""

import itertools
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_omni_plugin.admission import AdmissionPlan
from vllm_omni_plugin.balancing.interface import prompt_tokens
from vllm_omni_plugin.errors import (
    MessageTooLargeError,
    NoReplicaError,
    OmniError,
    RefusedError,
    ReplicaError,
    RequestLostError,
)
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.dispatch.head_queue import Choice, HeadQueue
from vllm_omni_plugin.orchestrator.dispatch.held_requests import HeldRequests, MoveBudget
from vllm_omni_plugin.orchestrator.dispatch.refused_runs import RefusedRuns
from vllm_omni_plugin.orchestrator.dispatch.suspects import Suspects
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics, Waiting, count
from vllm_omni_plugin.orchestrator.requests.stage_run import Accepted, Loss, RequestPhase, RunEnded, StageRun
from vllm_omni_plugin.vllm_api.requests.move import Move

if TYPE_CHECKING:
    # Imports vLLM, which nothing here does.
    from vllm_omni_plugin.vllm_api.requests.engine_api import EngineApi

logger = init_logger(__name__)


class Dispatcher:
    """Sends the runs of one stage to its replicas. Lives on the orchestrator's loop; nothing in it waits for anything.

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
        fed: see `RefusedRuns`.
        plan: see `HeadQueue`.
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
        fed: bool = False,
        plan: AdmissionPlan | None = None,
    ) -> None:
        self._pool = pool
        self._api = api
        self._migration_limit = migration_limit
        self._clock = clock
        self._metrics = metrics
        metrics.waiting_in[pool.stage_id] = lambda: Waiting(
            len(self._held), len(self._refused), len(self._moving) + len(self._suspects)
        )
        self._wake_at = wake_at
        self._held = HeldRequests(replica_wait, wake_at)
        self._moves = moves
        # In the order of their losses.
        self._moving: dict[StageRun, None] = {}
        self._is_moving = False
        self._suspects = Suspects(pool, wake_at, clock)
        self._queue = HeadQueue(pool, plan, metrics, clock, wake_at)
        metrics.queued_in[pool.stage_id] = lambda: len(self._queue)
        # Replicas that may have room since something left them otherwise than by an output.
        self._freed: dict[PoolMember, None] = {}
        self._refused = RefusedRuns(pool, self._suspects, wake_at, clock, fed)
        self._ended: list[RunEnded] = []
        # Two heads may share an engine, and so may one head before and after its restart: ids must not meet there.
        self._head_tag = secrets.token_hex(4)
        self._attempts = itertools.count(1)

    @property
    def can_dispatch(self) -> bool:
        """Whether a replica takes requests now."""
        return bool(self._pool.serving)

    @property
    def queue(self) -> HeadQueue:
        """What waits for its replica."""
        return self._queue

    def submit(self, run: StageRun) -> Sequence[RunEnded]:
        """Take a new run. There must be no other one of the same request."""
        self._dispatch(run)
        return self._take_ended() if self._ended else ()

    def add_chunk(self, run: StageRun, chunk: Any) -> Sequence[RunEnded]:
        """A further chunk of a streaming-input session was submitted; one that is not resumable closes the input."""
        session = run.streaming
        assert session is not None
        member = self._member_of(run)
        run.add_chunk(chunk)
        waits = run in self._queue
        if run.finished:
            self._end(run)
        if member is not None and not waits:
            session.note_sent(chunk)
            self._send(member, run, chunk)
        else:
            session.unsent.append(chunk)
        if run.finished:
            self._ended.append(RunEnded(run))
        return self._take_ended()

    def abort(self, runs: Iterable[StageRun]) -> None:
        """Forget these runs and tell their replicas. Nothing to do for those that have ended."""
        by_member: dict[PoolMember, list[str]] = {}
        for run in [run for run in runs if not run.closed]:
            member = self._member_of(run)
            if member is not None and run.sent:
                by_member.setdefault(member, []).append(run.engine_request_id)
            self._end(run)
        for member, engine_request_ids in by_member.items():
            self._abort_at(member, engine_request_ids)
        if by_member and len(self._queue):
            # Not at once: whoever ends these requests may be in the middle of sending others.
            self._freed.update(dict.fromkeys(by_member))
            self._wake_at(self._clock())

    def has_room(self, member: PoolMember) -> Sequence[RunEnded]:
        """An output or a report of a replica has been dealt with: what waits may go there."""
        if len(self._queue):
            self._fill(member)
        return self._take_ended() if self._ended else ()

    def held_back(self, member: PoolMember) -> Sequence[RunEnded]:
        """A replica gets no new requests. Those that wait for it go elsewhere, or to it if there is no other one."""
        if self._pool.serving:
            for run in self._queue.waiting_for(member):
                self._recall(run)
        return self._take_ended()

    def accept(self, member: PoolMember, outputs: Iterable[Any]) -> tuple[list[Accepted], Sequence[RunEnded]]:
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
                    member.account.produce(run, len(output.new_token_ids))
                    run.produced.extend(output.new_token_ids)
                elif not self._take(member, run, output):
                    continue
                accepted.append((run, output))
            except Exception as error:
                self._give_up_alone(run, error)
        return accepted, self._take_ended() if self._ended else ()

    def move(self, runs: Sequence[StageRun], lost: PoolMember, reason: str, engine_failed: bool) -> Sequence[RunEnded]:
        """These requests' replica is lost, and they are no longer charged to it: each moves or fails.

        Args:
            runs: the requests.
            lost: the replica.
            reason: why it is lost, for errors.
            engine_failed: whether its engine crashed by itself or said what cannot be used: a request may be the cause.
        """
        loss = Loss(lost.replica_id, reason)
        if engine_failed and not self._pool.lockstep:
            self._suspects.engine_failed(runs, loss)
        self._suspects.lost(lost)
        for run in runs:
            self._queue.leave(run)
        self._dispatch_suspects()
        # Suspects first, so that the others can avoid the replicas where they are tried.
        for run in sorted(runs, key=lambda run: not run.suspicions):
            try:
                self._move(run, lost, loss)
            except Exception as error:
                self._give_up_alone(run, error)
        return self._take_ended()

    def replica_serves(self) -> Sequence[RunEnded]:
        """A replica takes new requests: dispatch what was held, in order."""
        while self._pool.serving and (run := self._held.take()) is not None:
            self._metrics.hold_time.observe(self._clock() - run.waits_since)
            self._dispatch(run)
        self._dispatch_suspects()
        for member in self._pool.serving if len(self._queue) else ():
            self._fill(member)
        return self._take_ended()

    def tick(self) -> Sequence[RunEnded]:
        """Time has passed, as `wake_at` was told: refuse what has waited in vain, and let others go on."""
        while (run := self._held.take_overdue(self._clock())) is not None:
            self._metrics.hold_time.observe(self._held.wait)
            self._refuse(run, waited=self._held.wait)
        for run, error in self._queue.overdue():
            self._turn_away(run, error)
        self._dispatch_moving()
        self._dispatch_suspects()
        while (run := self._refused.take()) is not None:
            self._dispatch(run)
        while self._freed:
            self._fill(self._freed.popitem()[0])
        return self._take_ended()

    def _take_ended(self) -> Sequence[RunEnded]:
        ended, self._ended = self._ended, []
        return ended

    def _take(self, member: PoolMember, run: StageRun, output: Any) -> bool:
        """Take in an output of a current attempt. Returns whether it is to be delivered."""
        tokens, finished = output.new_token_ids, output.finish_reason is not None
        cut_short = finished and self._api.cut_short(output)
        if cut_short and self._goes_on_elsewhere(member, run, output):
            return False
        if not (run.began or cut_short):
            self._begin(member, run, output)
        # Counted whether the client gets it or not.
        member.account.produce(run, len(tokens))
        if run.joining and not self._fit(run, output, cut_short):
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
        may_move = not run.began and self._api.refused(output) and not self._api.fetches_once(run.request)
        return may_move and self._refused.refuse(run, member)

    def _begin(self, member: PoolMember, run: StageRun, output: Any) -> None:
        cached_tokens = self._api.cached_tokens(output)
        self._pool.begin(member, run, cached_tokens)
        if cached_tokens is not None:
            self._metrics.matched_tokens += run.decision.matched_tokens
            self._metrics.cached_tokens += cached_tokens
        if run.suspicions:
            self._suspects.clear(run)

    def _move(self, run: StageRun, lost: PoolMember, loss: Loss) -> None:
        move = self._api.how_to_move(run.request)
        error = run.lose_replica(loss, self._migration_limit, move, self._api.vocabulary)
        if error is not None:
            if loss.culprit is run:
                self._metrics.queries_of_death += 1
            else:
                self._metrics.lost += 1
            self._fail(run, error)
        elif not self._end_if_whole(run, lost):
            self._metrics.moves_by_way[run.move] += 1
            self._moving[run] = None
            self._dispatch_moving()

    def _dispatch_moving(self) -> None:
        # The next replica may turn out to be dead, too; then its requests come in here and have their turn below.
        if self._is_moving:
            return
        self._is_moving = True
        try:
            while self._moving and self._moves.take():
                run = next(iter(self._moving))
                del self._moving[run]
                self._dispatch(run)
        finally:
            self._is_moving = False
            if self._moving:
                self._wake_at(self._moves.next_at)

    def _dispatch_suspects(self) -> None:
        while (run := self._suspects.next_free()) is not None:
            self._dispatch(run, may_wait=False)

    def _fill(self, member: PoolMember) -> None:
        """Send a replica what waits for it, as far as it has room; or what waits for others, if that is better."""
        for run, request in self._queue.ready(member):
            self._start(member, run, request)
        for run, chosen in self._queue.recalls(member):
            self._recall(run, chosen)

    def _recall(self, run: StageRun, chosen: Choice | None = None) -> None:
        """A request that waits for its replica goes to another one, or looks for one."""
        self._queue.leave(run)
        self._pool.release(run)
        run.refuse()
        if run.dispatches:
            run.dispatches.pop()
        self._dispatch(run, chosen=chosen)

    def _turn_away(self, run: StageRun, error: RefusedError) -> None:
        count(self._metrics.refusals, (self._pool.stage_id, error.reason, str(error.status)))
        self._fail(run, error)

    def _dispatch(self, run: StageRun, may_wait: bool = True, chosen: Choice | None = None) -> None:
        """Send a request to the replica its pool picks, or let it wait for that one, or hold it."""
        if run.suspicions and may_wait and self._suspects.hold(run):
            return
        try:
            request = run.request if run.attempts or run.first_request is None else run.first_request
            if run.move is not Move.RESTART:
                request = self._api.moved(request, run.move, run.produced)
            member = self._choose(run, request, chosen)
            if request.abort_immediately or not self._queue.must_wait(member, run):
                self._start(member, run, request)
            else:
                for refused, error in self._queue.wait(run, member, request):
                    self._turn_away(refused, error)
        except RefusedError as error:
            self._turn_away(run, error)
        except NoReplicaError:
            self._hold(run)
        except RequestLostError as error:
            self._metrics.lost += 1
            self._fail(run, error)
        except Exception as error:
            self._give_up_alone(run, error)

    def _start(self, member: PoolMember, run: StageRun, request: Any) -> None:
        """Send a request to the replica that it is charged to; on to the next if that one turns out to be dead."""
        attempt = run.engine_request_id
        if run.dispatched_at is None:
            run.dispatched_at = self._clock()
            self._metrics.queue_time.observe(run.dispatched_at - run.submitted_at)
        self._queue.started(run)
        self._send(member, run, request)
        if run.engine_request_id != attempt:
            # The replica turned out to be dead, so the request has moved, or waits with all that has not been sent.
            return
        if run.streaming is not None:
            for chunk in run.streaming.take_unsent():
                self._send(member, run, chunk)
        if request.abort_immediately:
            # vLLM submits such a request only for the clean-up it causes in the engine, which never answers it.
            self._end(run)
            self._ended.append(RunEnded(run))

    def _choose(self, run: StageRun, request: Any, chosen: Choice | None) -> PoolMember:
        """The replica of the next attempt, which is charged with it from here on."""
        is_first = not run.attempts
        if is_first or run.move is not Move.RESTART:
            run.task, run.affinity_key = self._api.describe(request)
            self._queue.enter(run, run.request, prompt_tokens(run.task))
        if chosen is None:
            stays = run.affinity_key is not None and self._api.how_to_move(request) is Move.STAYS
            chosen = self._pool.decide(run.task, run.affinity_key, self._refused.avoided(run), stays)
        member, decision = chosen
        attempt = f"{run.request_id}-{self._head_tag}-{next(self._attempts):x}"
        run.dispatch(member.replica_id, attempt, run.task, decision, self._clock())
        self._pool.charge(member, run)
        count(self._metrics.decisions, (member.stage_id, self._pool.policy, decision.reason))
        if decision.fallback:
            count(self._metrics.fallbacks, (member.stage_id, self._pool.policy, decision.fallback))
        if run.suspicions:
            self._suspects.begin(run, member)
        if run.dispatches is not None and not run.produced:
            run.dispatches.append((member.name, decision))
        return member

    def _send(self, member: PoolMember, run: StageRun, request: Any) -> None:
        if run.replica_id != member.replica_id or member.client is None:
            # An earlier chunk of the same session was the last that could be sent.
            return
        try:
            member.client.add_request(request, run.engine_request_id)
            if not run.sent:
                member.account.send(run)
        except MessageTooLargeError as error:
            self._fail(run, error)
        except ReplicaError:
            # The client has reported its death meanwhile, and with it every request charged to the replica.
            return
        except Exception as error:
            self._give_up_alone(run, OmniError(f"The request could not be encoded for the engine: {error}"))

    def _hold(self, run: StageRun) -> None:
        # Without an engine there is nothing to clean up either.
        if run.request.abort_immediately or not self._held.hold(run, self._clock()):
            self._refuse(run, waited=0.0)

    def _refuse(self, run: StageRun, waited: float) -> None:
        self._metrics.refused += 1
        self._fail(run, run.give_up(self._pool.unavailable(waited)))

    def _fit(self, run: StageRun, output: Any, cut_short: bool) -> bool:
        """Fit output of a moved request to what was delivered before. Returns whether anything of it is new."""
        tokens, finished = output.new_token_ids, output.finish_reason is not None
        try:
            swallow = len(tokens) if cut_short else run.join(tokens, finished)
        except RequestLostError as error:
            self._metrics.diverged += 1
            self._metrics.lost += 1
            self._fail(run, error)
            return False
        self._metrics.swallowed_tokens += swallow
        if run.finished:
            # The last turn of a session, of which nothing was missing.
            self._end(run)
            self._ended.append(RunEnded(run))
            return False
        if run.joining and not cut_short:
            return False
        self._api.fit(output, swallow)
        return True

    def _end_if_whole(self, run: StageRun, lost: PoolMember) -> bool:
        """End a lost request of which only the end was missing. Returns whether it was one."""
        outputs = self._api.missing_end(run.request, run.produced, lost.engine_index)
        # The parameters of a session bound a turn and not the whole.
        if outputs is None or run.streaming is not None:
            return False
        self._end(run)
        self._ended.append(RunEnded(run, outputs))
        return True

    def _abort_at(self, member: PoolMember, engine_request_ids: Sequence[str]) -> None:
        # A replica that turns out to be dead has nothing left to abort.
        with suppress(ReplicaError):
            if member.client is not None:
                member.client.abort_requests(engine_request_ids)

    def _member_of(self, run: StageRun) -> PoolMember | None:
        return self._pool.member(run.replica_id) if run.replica_id is not None else None

    def _end(self, run: StageRun) -> None:
        run.abort()
        run.closed = True
        if run.replica_id is not None:
            self._pool.release(run)
        else:
            self._moving.pop(run, None)
            self._held.remove(run)
        self._queue.ended(run)
        if run.suspicions:
            self._suspects.forget(run)
        self._refused.forget(run)

    def _give_up_alone(self, run: StageRun, error: Exception) -> None:
        """What is wrong with one request, or with our handling of it, ends that request and nothing else."""
        logger.error("Request %s is given up: %s", run.request_id, error, exc_info=error)
        self._fail(run, error if isinstance(error, OmniError) else OmniError(f"The request failed: {error!r}"))

    def _fail(self, run: StageRun, error: OmniError) -> None:
        """End a request with an error, unless it has ended; its engine may have some of it."""
        if not run.closed:
            self.abort((run,))
            self._ended.append(RunEnded(run, error=error))
