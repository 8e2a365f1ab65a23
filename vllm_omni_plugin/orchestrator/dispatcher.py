"""The requests: each goes to a replica, its outputs come back, and it moves when its replica is lost."""

import itertools
import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

from vllm_omni_plugin.errors import OmniError, ReplicaError, RequestLostError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.held_requests import HeldRequests
from vllm_omni_plugin.orchestrator.messages import RequestFailed, SubmitRequest
from vllm_omni_plugin.orchestrator.metrics import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.request_api import RequestApi
from vllm_omni_plugin.orchestrator.request_state import Fail, OrchestratorRequestState, StreamingInputState
from vllm_omni_plugin.orchestrator.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.orchestrator.tasks import make_task
from vllm_omni_plugin.vllm_api.move import Move

logger = init_logger(__name__)


class Dispatcher:
    """Owns the requests. Lives on the orchestrator's loop; nothing in it waits for anything.

    Args:
        pool: the replicas.
        api: see `RequestApi`.
        migration_limit: moves a request may make.
        replica_wait: seconds that a request waits while no replica serves.
        clock: monotonic seconds.
        metrics: what it counts.
        put: gives an item to AsyncLLM's side.

    Attributes:
        states: unfinished requests by the client's id.
    """

    def __init__(
        self,
        pool: StagePool,
        api: RequestApi,
        migration_limit: int,
        replica_wait: float,
        clock: Callable[[], float],
        metrics: OrchestratorMetrics,
        put: Callable[[Any], None],
    ) -> None:
        self.states: dict[str, OrchestratorRequestState] = {}
        self._pool = pool
        self._api = api
        self._migration_limit = migration_limit
        self._clock = clock
        self._metrics = metrics
        self._put = put
        self._held = HeldRequests(replica_wait, clock, self._give_up)
        # Two heads may share an engine, and so may one head before and after its restart: ids must not meet there.
        self._head_tag = secrets.token_hex(4)
        self._attempts = itertools.count(1)

    def submit(self, message: SubmitRequest) -> None:
        """Take a new request, or a further chunk of a streaming-input session."""
        state = self.states.get(message.request.request_id)
        if state is not None and state.streaming is not None:
            self._continue_session(state, state.streaming, message.request)
            return
        if state is not None:
            # Two attempts under one client id could not be told apart; the newer one is the one that is waited for.
            self.abort((state.request_id,))
        streaming = StreamingInputState() if message.request.resumable else None
        request = self._api.movable(message.request)
        state = OrchestratorRequestState(request, message.submitted_at, streaming=streaming, receipt=message.receipt)
        self.states[state.request_id] = state
        self._dispatch(state)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Forget these requests and tell their replicas. Unknown ids are those that have just ended."""
        by_member: dict[PoolMember, list[str]] = {}
        for request_id in request_ids:
            state = self.states.get(request_id)
            if state is None:
                continue
            member = self._member_of(state)
            if member is not None:
                by_member.setdefault(member, []).append(state.engine_request_id)
            state.abort()
            self._end(state)
        for member, engine_request_ids in by_member.items():
            # A replica that turns out to be dead has nothing left to abort.
            with suppress(ReplicaError):
                if member.client is not None:
                    member.client.abort_requests(engine_request_ids)

    def accept(self, member: PoolMember, output: Any) -> bool:
        """Whether the output is for the client: that of a current attempt which the client does not have yet.

        Anything else is dropped. The client's id is restored, and what is finished is released.
        """
        state = member.in_flight.get(output.request_id)
        if state is None:
            self._abort_if_orphan(member, output)
            return False
        output.request_id = state.request_id
        finished = output.finish_reason is not None
        cut_short = finished and self._api.cut_short(output)
        self._count(member, state, output, cut_short)
        if state.joining and not self._fit(state, output, cut_short):
            return False
        state.deliver(output.new_token_ids, finished, cut_short)
        if state.finished:
            self._end(state)
        return True

    def move(self, states: Sequence[OrchestratorRequestState], lost: PoolMember, reason: str) -> None:
        """These requests' replica is lost, and they are no longer charged to it: each moves or fails."""
        for state in states:
            action = state.lose_replica(reason, self._migration_limit, self._api.how_to_move(state.request))
            if isinstance(action, Fail):
                self._metrics.lost += 1
                self._fail(state, action.error)
            elif not self._end_if_whole(state, lost):
                self._metrics.moves_by_way[action.move] += 1
                self._dispatch(state)

    def replica_serves(self) -> None:
        """A replica takes new requests: dispatch what was held, in order."""
        while self._pool.serving and (state := self._held.take()) is not None:
            self._metrics.hold_time.observe(self._clock() - state.waits_since)
            self._dispatch(state)
        self._metrics.held = len(self._held)

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        self._held.close()

    def _dispatch(self, state: OrchestratorRequestState) -> None:
        """Send a request to the replica its pool picks, or hold it; on to the next if that one turns out to be dead."""
        if not self._pool.serving:
            self._hold(state)
            return
        request = state.request
        if state.move is not Move.RESTART:
            request = self._api.moved(request, state.move, state.produced)
        member = self._choose(state, request)
        if state.attempts == 1:
            self._metrics.queue_time.observe(self._clock() - state.submitted_at)
        self._send(member, state, request)
        if state.streaming is not None:
            for chunk in state.streaming.take_unsent():
                self._send(member, state, chunk)
        if request.abort_immediately:
            # vLLM submits such a request only for the clean-up it causes in the engine, which never answers it.
            self._end(state)

    def _choose(self, state: OrchestratorRequestState, request: Any) -> PoolMember:
        """The replica of the next attempt, which is charged with it from here on."""
        if state.task is None or state.move is not Move.RESTART:
            state.task = make_task(request, self._api.describe(request))
        member, state.decision = self._pool.decide(state.task, self._api.affinity_key(request))
        state.dispatch(member.replica_id, f"{state.request_id}-{self._head_tag}-{next(self._attempts):x}")
        self._pool.charge(member, state, state.task, state.decision)
        self._metrics.decided(self._pool.stage_id, self._pool.policy, state.decision)
        if state.receipt is not None and not state.produced:
            state.receipt.append((member.name, state.decision))
        return member

    def _count(self, member: PoolMember, state: OrchestratorRequestState, output: Any, cut_short: bool) -> None:
        """Count what the engine has done for a request, whether the client gets it or not."""
        charge = state.charge
        assert charge is not None
        if not (charge.began or cut_short):
            cached_tokens = self._api.cached_tokens(output)
            self._pool.begin(member, charge, cached_tokens)
            self._metrics.began(charge.decision, cached_tokens)
        member.account.produce(charge, len(output.new_token_ids))

    def _send(self, member: PoolMember, state: OrchestratorRequestState, request: Any) -> None:
        if state.replica_id != member.replica_id or member.client is None:
            # An earlier chunk of the same session was the last that could be sent.
            return
        try:
            member.client.add_request(request, state.engine_request_id)
        except ReplicaError:
            # The client has reported its death meanwhile, and with it every request charged to the replica.
            return
        except Exception as error:
            logger.exception("Request %s could not be sent.", state.request_id)
            # The engine may hold earlier chunks of the same session.
            self.abort((state.request_id,))
            self._fail(state, OmniError(f"The request could not be encoded for the engine: {error}"))

    def _continue_session(self, state: OrchestratorRequestState, session: StreamingInputState, chunk: Any) -> None:
        member = self._member_of(state)
        state.add_chunk(chunk.resumable)
        if state.finished:
            self._end(state)
        if member is not None:
            self._send(member, state, chunk)
        else:
            session.unsent.append(chunk)

    def _hold(self, state: OrchestratorRequestState) -> None:
        # Without an engine there is nothing to clean up either.
        if state.request.abort_immediately or not self._held.hold(state):
            self._refuse(state, waited=0.0)
        self._metrics.held = len(self._held)

    def _give_up(self, state: OrchestratorRequestState) -> None:
        """A request was held in vain."""
        self._metrics.held = len(self._held)
        self._metrics.hold_time.observe(self._held.wait)
        self._refuse(state, waited=self._held.wait)

    def _refuse(self, state: OrchestratorRequestState, waited: float) -> None:
        self._metrics.refused += 1
        self._fail(state, state.give_up(self._pool.unavailable(waited)).error)

    def _fit(self, state: OrchestratorRequestState, output: Any, cut_short: bool) -> bool:
        """Fit output of a moved request to what was delivered before. Returns whether anything of it is new."""
        tokens, finished = output.new_token_ids, output.finish_reason is not None
        try:
            swallow = len(tokens) if cut_short else state.join(tokens, finished)
        except RequestLostError as error:
            self._metrics.diverged += 1
            self._metrics.lost += 1
            self.abort((state.request_id,))
            self._fail(state, error)
            return False
        self._metrics.swallowed_tokens += swallow
        if state.joining and not cut_short:
            return False
        self._api.fit(output, swallow)
        return True

    def _end_if_whole(self, state: OrchestratorRequestState, lost: PoolMember) -> bool:
        """End a lost request of which only the end was missing. Returns whether it was one."""
        outputs = self._api.missing_end(state.request, state.produced, lost.replica_id)
        if outputs is None:
            return False
        state.abort()
        self._end(state)
        self._put(outputs)
        return True

    def _abort_if_orphan(self, member: PoolMember, output: Any) -> None:
        """A request that this head never sent was left behind by another one; nobody else would end it."""
        if self._head_tag in output.request_id or output.finish_reason is not None or member.client is None:
            return
        with suppress(ReplicaError):
            member.client.abort_requests([output.request_id])

    def _member_of(self, state: OrchestratorRequestState) -> PoolMember | None:
        return self._pool.member(state.replica_id) if state.replica_id is not None else None

    def _end(self, state: OrchestratorRequestState) -> None:
        self._pool.release(state)
        if self._held.remove(state):
            self._metrics.held = len(self._held)
        self.states.pop(state.request_id, None)

    def _fail(self, state: OrchestratorRequestState, error: OmniError) -> None:
        self.states.pop(state.request_id, None)
        self._put(RequestFailed(state.request_id, error))
