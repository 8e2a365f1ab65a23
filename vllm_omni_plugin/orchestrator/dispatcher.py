"""The requests of one stage: each goes to a replica, its outputs come back, and it moves when its replica is lost."""

import itertools
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Protocol

from vllm_omni_plugin.errors import MessageTooLargeError, OmniError, ReplicaError, RequestLostError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.engine_index import engine_index
from vllm_omni_plugin.orchestrator.held_requests import HeldRequests
from vllm_omni_plugin.orchestrator.metrics import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.move_line import MoveLine
from vllm_omni_plugin.orchestrator.request_api import RequestApi
from vllm_omni_plugin.orchestrator.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.orchestrator.stage_run import Fail, Loss, StageRun
from vllm_omni_plugin.orchestrator.suspects import Suspects
from vllm_omni_plugin.orchestrator.tasks import make_task
from vllm_omni_plugin.vllm_api.move import Move

logger = init_logger(__name__)


class RunListener(Protocol):
    """Told of what happens to runs other than by an output of theirs; `conductor.Conductor` in service."""

    def run_dispatched(self, stage_id: int, run: StageRun) -> None:
        """Its first attempt is about to be sent."""

    def run_failed(self, stage_id: int, run: StageRun, error: OmniError) -> None:
        """It has ended with this error."""

    def run_ended(self, stage_id: int, run: StageRun, outputs: Any | None) -> None:
        """It has ended, with these `EngineCoreOutputs` in place of its engine's last, or without any."""


class Dispatcher:
    """Owns the runs of one stage. Lives on the orchestrator's loop; nothing in it waits for anything.

    Args:
        pool: the stage's replicas.
        api: see `RequestApi`.
        migration_limit: moves a request may make, without those for which another one is to blame.
        replica_wait: seconds that a request waits while no replica serves.
        clock: monotonic seconds.
        metrics: what it counts.
        moves: lets requests of lost replicas go on.
        listener: see `RunListener`.

    Attributes:
        runs: unfinished ones by the client's id.
    """

    def __init__(
        self,
        pool: StagePool,
        api: RequestApi,
        migration_limit: int,
        replica_wait: float,
        clock: Callable[[], float],
        metrics: OrchestratorMetrics,
        moves: MoveLine,
        listener: RunListener,
    ) -> None:
        self.runs: dict[str, StageRun] = {}
        self._pool = pool
        self._api = api
        self._migration_limit = migration_limit
        self._clock = clock
        self._metrics = metrics
        metrics.held_by_stage[pool.stage_id] = 0
        self._listener = listener
        self._held = HeldRequests(replica_wait, clock, self._give_up)
        self._moves = moves
        self._suspects = Suspects(pool, clock, self._dispatch_now, metrics)
        # Two heads may share an engine, and so may one head before and after its restart: ids must not meet there.
        self._head_tag = secrets.token_hex(4)
        self._attempts = itertools.count(1)

    @property
    def can_dispatch(self) -> bool:
        """Whether a replica takes requests now."""
        return bool(self._pool.serving)

    def submit(self, run: StageRun) -> None:
        """Take a new run. There must be no other one of the same request."""
        self.runs[run.request_id] = run
        self._dispatch(run)

    def add_chunk(self, run: StageRun, chunk: Any) -> None:
        """A further chunk of a streaming-input session was submitted; one that is not resumable closes the input."""
        session = run.streaming
        assert session is not None
        member = self._member_of(run)
        run.add_chunk(chunk)
        if run.finished:
            self._end(run)
        if member is not None:
            session.note_sent(chunk)
            self._send(member, run, chunk)
        else:
            session.unsent.append(chunk)
        if run.finished:
            self._listener.run_ended(self._pool.stage_id, run, None)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests and tell their replicas. Unknown ids are those that have just ended."""
        by_member: dict[PoolMember, list[str]] = {}
        for request_id in request_ids:
            run = self.runs.get(request_id)
            if run is None:
                continue
            member = self._member_of(run)
            if member is not None:
                by_member.setdefault(member, []).append(run.engine_request_id)
            run.abort()
            self._end(run)
        for member, engine_request_ids in by_member.items():
            # A replica that turns out to be dead has nothing left to abort.
            with suppress(ReplicaError):
                if member.client is not None:
                    member.client.abort_requests(engine_request_ids)

    def accept(self, member: PoolMember, output: Any) -> StageRun | None:
        """The run whose output this is: one of a current attempt which has not been delivered yet; None otherwise.

        Anything else is dropped. The client's id is restored, and what is finished is released.
        """
        run = member.in_flight.get(output.request_id)
        if run is None:
            self._abort_if_orphan(member, output)
            return None
        output.request_id = run.request_id
        try:
            return run if self._take(member, run, output) else None
        except Exception as error:
            self._give_up_alone(run, error)
            return None

    def _take(self, member: PoolMember, run: StageRun, output: Any) -> bool:
        """Take in an output of a current attempt. Returns whether it is to be delivered."""
        finished = output.finish_reason is not None
        cut_short = finished and self._api.cut_short(output)
        self._count(member, run, output, cut_short)
        if run.joining and not self._fit(run, output, cut_short):
            return False
        run.deliver(output.new_token_ids, finished, cut_short)
        if finished and run.finished:
            self._end(run)
        return True

    def move(self, runs: Sequence[StageRun], lost: PoolMember, reason: str, engine_failed: bool) -> None:
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
        # Suspects first, so that the others can avoid the replicas where they are tried.
        for run in sorted(runs, key=lambda run: not run.suspicions):
            try:
                self._move(run, lost, loss)
            except Exception as error:
                self._give_up_alone(run, error)

    def replica_serves(self) -> None:
        """A replica takes new requests: dispatch what was held, in order."""
        while self._pool.serving and (run := self._held.take()) is not None:
            self._metrics.hold_time.observe(self._clock() - run.waits_since)
            self._dispatch(run)
        self._metrics.held_by_stage[self._pool.stage_id] = len(self._held)
        self._suspects.let_go()

    def close(self) -> None:
        """Stop the timers. Idempotent."""
        self._held.close()
        self._suspects.close()

    def _move(self, run: StageRun, lost: PoolMember, loss: Loss) -> None:
        move = self._api.how_to_move(run.request)
        action = run.lose_replica(loss, self._migration_limit, move, self._api.vocabulary)
        if isinstance(action, Fail):
            if loss.culprit is run:
                self._metrics.queries_of_death += 1
            else:
                self._metrics.lost += 1
            self._fail(run, action.error)
        elif not self._end_if_whole(run, lost):
            self._metrics.moves_by_way[action.move] += 1
            self._moves.add(run, self._dispatch)

    def _dispatch(self, run: StageRun) -> None:
        """Send a request to the replica its pool picks, or hold it; on to the next if that one turns out to be dead."""
        if not (run.suspicions and self._suspects.hold(run)):
            self._dispatch_now(run)

    def _dispatch_now(self, run: StageRun) -> None:
        try:
            if self._pool.serving:
                self._send_to_one(run)
            else:
                self._hold(run)
        except Exception as error:
            self._give_up_alone(run, error)

    def _send_to_one(self, run: StageRun) -> None:
        request = run.next_request
        if run.move is not Move.RESTART:
            request = self._api.moved(request, run.move, run.produced)
        member = self._choose(run, request)
        if run.attempts == 1:
            run.dispatched_at = self._clock()
            self._metrics.queue_time.observe(run.dispatched_at - run.submitted_at)
            self._listener.run_dispatched(self._pool.stage_id, run)
        attempt = run.engine_request_id
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
            self._listener.run_ended(self._pool.stage_id, run, None)

    def _choose(self, run: StageRun, request: Any) -> PoolMember:
        """The replica of the next attempt, which is charged with it from here on."""
        if run.task is None or run.move is not Move.RESTART:
            run.task = make_task(request, self._api.describe(request))
        key = self._api.affinity_key(request)
        # What is bound to a replica finds what it needs nowhere else.
        avoid = self._suspects.avoided(run) if key is None or run.suspicions else ()
        member, run.decision = self._pool.decide(run.task, key, avoid)
        run.dispatch(member.replica_id, f"{run.request_id}-{self._head_tag}-{next(self._attempts):x}")
        self._pool.charge(member, run, run.task, run.decision)
        if run.suspicions:
            self._suspects.begin(run, member)
        self._metrics.decided(self._pool.stage_id, self._pool.policy, run.decision)
        if run.dispatches is not None and not run.produced:
            run.dispatches.append((member.name, run.decision))
        return member

    def _count(self, member: PoolMember, run: StageRun, output: Any, cut_short: bool) -> None:
        """Count what the engine has done for a request, whether the client gets it or not."""
        charge = run.charge
        assert charge is not None
        if not (charge.began or cut_short):
            cached_tokens = self._api.cached_tokens(output)
            self._pool.begin(member, charge, cached_tokens)
            self._metrics.began(charge.decision, cached_tokens)
            if run.suspicions:
                self._suspects.clear(run)
        member.account.produce(charge, len(output.new_token_ids))

    def _send(self, member: PoolMember, run: StageRun, request: Any) -> None:
        if run.replica_id != member.replica_id or member.client is None:
            # An earlier chunk of the same session was the last that could be sent.
            return
        try:
            member.client.add_request(request, run.engine_request_id)
            run.sent = True
        except MessageTooLargeError as error:
            self.abort((run.request_id,))
            self._fail(run, error)
        except ReplicaError:
            # The client has reported its death meanwhile, and with it every request charged to the replica.
            return
        except Exception as error:
            self._give_up_alone(run, OmniError(f"The request could not be encoded for the engine: {error}"))

    def _hold(self, run: StageRun) -> None:
        # Without an engine there is nothing to clean up either.
        if run.request.abort_immediately or not self._held.hold(run):
            self._refuse(run, waited=0.0)
        self._metrics.held_by_stage[self._pool.stage_id] = len(self._held)

    def _give_up(self, run: StageRun) -> None:
        """A request was held in vain."""
        self._metrics.held_by_stage[self._pool.stage_id] = len(self._held)
        self._metrics.hold_time.observe(self._held.wait)
        self._refuse(run, waited=self._held.wait)

    def _refuse(self, run: StageRun, waited: float) -> None:
        self._metrics.refused += 1
        self._fail(run, run.give_up(self._pool.unavailable(waited)).error)

    def _fit(self, run: StageRun, output: Any, cut_short: bool) -> bool:
        """Fit output of a moved request to what was delivered before. Returns whether anything of it is new."""
        tokens, finished = output.new_token_ids, output.finish_reason is not None
        try:
            swallow = len(tokens) if cut_short else run.join(tokens, finished)
        except RequestLostError as error:
            self._metrics.diverged += 1
            self._metrics.lost += 1
            self.abort((run.request_id,))
            self._fail(run, error)
            return False
        self._metrics.swallowed_tokens += swallow
        if run.finished:
            # The last turn of a session, of which nothing was missing.
            self._end(run)
            self._listener.run_ended(self._pool.stage_id, run, None)
            return False
        if run.joining and not cut_short:
            return False
        self._api.fit(output, swallow)
        return True

    def _end_if_whole(self, run: StageRun, lost: PoolMember) -> bool:
        """End a lost request of which only the end was missing. Returns whether it was one."""
        if run.streaming is not None:
            # Its parameters bound a turn and not the whole.
            return False
        index = engine_index(lost.stage_id, lost.replica_id)
        outputs = self._api.missing_end(run.request, run.produced, index)
        if outputs is None:
            return False
        run.abort()
        self._end(run)
        self._listener.run_ended(self._pool.stage_id, run, outputs)
        return True

    def _abort_if_orphan(self, member: PoolMember, output: Any) -> None:
        """A request that this head never sent was left behind by another one; nobody else would end it."""
        if self._head_tag in output.request_id or output.finish_reason is not None or member.client is None:
            return
        with suppress(ReplicaError):
            member.client.abort_requests([output.request_id])

    def _member_of(self, run: StageRun) -> PoolMember | None:
        return self._pool.member(run.replica_id) if run.replica_id is not None else None

    def _end(self, run: StageRun) -> None:
        self._pool.release(run)
        self._moves.remove(run)
        if run.suspicions:
            self._suspects.forget(run)
        if self._held.remove(run):
            self._metrics.held_by_stage[self._pool.stage_id] = len(self._held)
        self.runs.pop(run.request_id, None)

    def _give_up_alone(self, run: StageRun, error: Exception) -> None:
        """What is wrong with one request, or with our handling of it, ends that request and nothing else."""
        logger.error("Request %s is given up: %s", run.request_id, error, exc_info=error)
        if self.runs.get(run.request_id) is run:
            # Its engine may have some of it.
            self.abort((run.request_id,))
            self._fail(run, error if isinstance(error, OmniError) else OmniError(f"The request failed: {error!r}"))

    def _fail(self, run: StageRun, error: OmniError) -> None:
        self.runs.pop(run.request_id, None)
        self._listener.run_failed(self._pool.stage_id, run, error)
