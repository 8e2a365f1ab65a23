"""Sending the requests of one stage: each to a replica, or into the line of those that wait for one."""

import itertools
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from vllm_omni_plugin.errors import (
    MessageTooLargeError,
    NoReplicaError,
    OmniError,
    RefusedError,
    ReplicaError,
    RequestLostError,
)
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.dispatch.entrance import Entrance
from vllm_omni_plugin.orchestrator.dispatch.head_queue import Choice, HeadQueue
from vllm_omni_plugin.orchestrator.dispatch.held_requests import HeldRequests, MoveBudget
from vllm_omni_plugin.orchestrator.dispatch.refused_runs import RefusedRuns
from vllm_omni_plugin.orchestrator.dispatch.suspects import Suspects
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics, Waiting, count
from vllm_omni_plugin.orchestrator.requests.stage_run import RunEnded, StageRun
from vllm_omni_plugin.vllm_api.requests.move import Move

if TYPE_CHECKING:
    # Imports vLLM, which nothing here does.
    from vllm_omni_plugin.vllm_api.requests.engine_api import EngineApi

logger = init_logger(__name__)


class Sender:
    """Chooses replicas for the runs of one stage, sends them, lets them wait, and ends them. See `Dispatcher`.

    Args:
        pool: the stage's replicas.
        api: see `EngineApi`.
        migration_limit: moves a request may make, without those for which another one is to blame.
        replica_wait: seconds that a request waits while no replica serves.
        clock: monotonic seconds.
        metrics: what it counts.
        moves: how many requests of lost replicas may go on.
        wake_at: asks for a call of `tick` at this time or before, in monotonic seconds.
        entrance: see `HeadQueue`.
        fed: see `RefusedRuns`.
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
        entrance: Entrance,
        fed: bool = False,
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
        self._queue = HeadQueue(pool, entrance, metrics, clock, wake_at)
        metrics.queued_in[pool.stage_id] = lambda: len(self._queue)
        # Replicas that may have room since something left them otherwise than by an output.
        self._freed: dict[PoolMember, None] = {}
        self._refused = RefusedRuns(pool, self._suspects, wake_at, clock, fed)
        self._ended: list[RunEnded] = []
        # Two heads may share an engine, and so may one head before and after its restart: ids must not meet there.
        self._head_tag = secrets.token_hex(4)
        self._attempts = itertools.count(1)

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

    def _take_ended(self) -> Sequence[RunEnded]:
        ended, self._ended = self._ended, []
        return ended

    def _fill(self, member: PoolMember) -> None:
        """Send a replica what waits for it, as far as it has room; or what waits for others, if that is better."""
        for run, request in self._queue.ready(member):
            self._start(member, run, request)
        for run, chosen in self._queue.recalls(member, self._refused.avoided):
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

    def _push_out(self, run: StageRun, error: RefusedError) -> None:
        self._turn_away(run, error)
        # What took its place may be at another stage, and then nobody asks here what has ended.
        self._wake_at(self._clock())

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
                self._queue.wait(run, member, request, self._push_out)
        except RefusedError as error:
            self._turn_away(run, error)
        except NoReplicaError:
            self._hold(run)
        except RequestLostError as error:
            self._lose(run, error)
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
        if run.closed or run.engine_request_id != attempt:
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
        error = run.give_up(self._pool.unavailable(waited))
        self._metrics.failed(error, refused=True)
        self._fail(run, error)

    def _lose(self, run: StageRun, error: RequestLostError) -> None:
        self._metrics.failed(error)
        self._fail(run, error)

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
        self._queue.leave(run)
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
