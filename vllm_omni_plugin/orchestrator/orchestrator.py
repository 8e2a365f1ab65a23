"""The orchestrator: takes requests from AsyncLLM, gives each to a replica, brings the outputs back."""

import asyncio
import itertools
import secrets
from collections.abc import Callable
from typing import Any, Protocol

from vllm_omni_plugin.balancing import Task
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.errors import NoReplicaError, OmniError, ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.fan_out import FanOut
from vllm_omni_plugin.orchestrator.handover import HandoverClosedError, HandoverQueue
from vllm_omni_plugin.orchestrator.messages import AbortRequests, CallReplicas, RequestFailed, SubmitRequest
from vllm_omni_plugin.orchestrator.metrics import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.request_state import Fail, OrchestratorRequestState, StreamingInputState
from vllm_omni_plugin.orchestrator.stage_pool import PoolMember, StagePool

logger = init_logger(__name__)

MAX_QUEUED_REQUESTS = 4096
"""Requests handed over and not taken yet before AsyncLLM waits."""
MAX_QUEUED_OUTPUTS = 4096
"""Output messages AsyncLLM has not taken yet before the replicas' sockets are left unread."""


class RequestApi(Protocol):
    """What the orchestrator asks about requests and outputs; `vllm_api.engine_api.EngineApi` in service."""

    def affinity_key(self, request: Any) -> int | None: ...

    def cut_short(self, output: Any) -> bool: ...

    def idle_report(self, engine_index: int) -> Any: ...


class Orchestrator:
    """Owns the requests and the pools. Everything but the queues belongs to the loop that runs `run`.

    Args:
        stage_pools: one pool per stage.
        api: see `RequestApi`.
        migration_limit: moves a request may make.
        clock: monotonic seconds.

    Attributes:
        request_async_queue: `SubmitRequest` and `AbortRequests`, in order.
        output_async_queue: vLLM's `EngineCoreOutputs`, and `RequestFailed`.
        rpc_async_queue: `CallReplicas`.
        request_states: unfinished requests by the client's id.
        stage_pools: the pools; their `members` and `serving` may be read from any thread.
        async_chunk: whether a stage may start on parts of its input. With one stage there is nothing to overlap.
    """

    async_chunk = False

    def __init__(
        self, stage_pools: list[StagePool], api: RequestApi, migration_limit: int, clock: Callable[[], float]
    ) -> None:
        self.stage_pools = stage_pools
        self.request_states: dict[str, OrchestratorRequestState] = {}
        self.request_async_queue: HandoverQueue[SubmitRequest | AbortRequests] = HandoverQueue(MAX_QUEUED_REQUESTS)
        self.output_async_queue: HandoverQueue[Any] = HandoverQueue(MAX_QUEUED_OUTPUTS)
        self.rpc_async_queue: HandoverQueue[CallReplicas] = HandoverQueue(MAX_QUEUED_REQUESTS)
        self.metrics = OrchestratorMetrics()
        self.fan_out = FanOut(stage_pools, self.distrust)
        self._api = api
        self._migration_limit = migration_limit
        self._clock = clock
        # Two heads may share an engine, and so may one head before and after its restart: ids must not meet there.
        self._head_tag = secrets.token_hex(4)
        self._attempts = itertools.count(1)
        self._throttle: asyncio.Task[None] | None = None

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.stage_pools)

    @property
    def can_serve(self) -> bool:
        """Whether every stage has a replica that takes requests. Safe to read from any thread."""
        return all(pool.serving for pool in self.stage_pools)

    async def run(self) -> None:
        """Serve the queues until they are closed. Sleeps while nothing comes."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._serve_requests(), name="omni-requests")
                tasks.create_task(self.fan_out.serve(self.rpc_async_queue), name="omni-calls")
        finally:
            if self._throttle is not None:
                self._throttle.cancel()

    def close_queues(self) -> None:
        """End `run` and release everybody who waits on a queue. Idempotent, from any thread."""
        self.request_async_queue.close()
        for call in self.rpc_async_queue.close():
            call.reply.cancel()
        self.output_async_queue.close()

    def outputs_received(self, member: PoolMember, outputs: Any) -> None:
        """Outputs came from a replica: release what finished, restore the client's ids, hand them over."""
        kept = [output for output in outputs.outputs if self._accept(member, output)]
        outputs.outputs = kept
        outputs.engine_index = member.replica_id
        if kept or outputs.scheduler_stats is not None:
            self._hand_over(outputs)

    def replica_lost(self, member: PoolMember, reason: str, status: ReplicaStatus = ReplicaStatus.DOWN) -> None:
        """A replica is gone: its requests move or fail, each exactly once."""
        pool = self.stage_pools[member.stage_id]
        orphans = pool.lose(member, status)
        logger.error(
            "Replica %d of stage %d is lost (%s) with %d requests in flight.",
            member.replica_id,
            pool.stage_id,
            reason,
            len(orphans),
        )
        for state in orphans:
            action = state.lose_replica(reason, self._migration_limit)
            if isinstance(action, Fail):
                self.metrics.lost += 1
                self._fail(state, action.error)
            else:
                self.metrics.moves += 1
                self._dispatch(state)
        self._hand_over(self._api.idle_report(member.replica_id))

    def distrust(self, member: PoolMember, reason: str) -> None:
        """Take out a replica that failed a call which others took, so that it starts afresh."""
        client = member.client
        if client is not None:
            self.replica_lost(member, reason, ReplicaStatus.ERROR)
            client.mark_dead(reason)

    async def _serve_requests(self) -> None:
        while True:
            try:
                batch = await self.request_async_queue.get_batch()
            except HandoverClosedError:
                return
            for message in batch:
                if isinstance(message, SubmitRequest):
                    self._submit(message)
                else:
                    self.abort(message.request_ids)

    def _submit(self, message: SubmitRequest) -> None:
        state = self.request_states.get(message.request.request_id)
        if state is not None and state.streaming is not None:
            self._continue_session(state, message.request)
            return
        if state is not None:
            # Two attempts under one client id could not be told apart; the newer one is the one that is waited for.
            self.abort((state.request_id,))
        streaming = StreamingInputState() if message.request.resumable else None
        state = OrchestratorRequestState(message.request, message.submitted_at, streaming=streaming)
        self.request_states[state.request_id] = state
        self._dispatch(state)

    def _dispatch(self, state: OrchestratorRequestState) -> None:
        """Send a queued request to the replica its pool picks; on to the next if that one turns out to be dead."""
        pool = self.stage_pools[0]
        request = state.request
        try:
            task: Task = {
                "request_id": state.request_id,
                "engine_inputs": request,
                "sampling_params": request.sampling_params,
            }
            member = pool.pick(task, self._api.affinity_key(request))
        except NoReplicaError as error:
            self.metrics.refused += 1
            self._fail(state, state.refuse(error).error)
            return
        state.dispatch(member.replica_id, f"{state.request_id}-{self._head_tag}-{next(self._attempts):x}")
        pool.charge(member, state)
        if state.attempts == 1:
            self.metrics.queue_time.observe(self._clock() - state.submitted_at)
        self._send(member, state, request)
        if request.abort_immediately:
            # vLLM submits such a request only for the clean-up it causes in the engine, which never answers it.
            self._end(state)

    def _send(self, member: PoolMember, state: OrchestratorRequestState, request: Any) -> None:
        assert member.client is not None
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

    def _continue_session(self, state: OrchestratorRequestState, chunk: Any) -> None:
        member = self._member_of(state)
        state.add_chunk(chunk.resumable)
        if state.finished:
            self._end(state)
        if member is not None:
            self._send(member, state, chunk)

    def abort(self, request_ids: tuple[str, ...]) -> None:
        """Forget these requests and tell their replicas. Unknown ids are those that have just ended."""
        by_member: dict[PoolMember, list[str]] = {}
        for request_id in request_ids:
            state = self.request_states.get(request_id)
            if state is None:
                continue
            member = self._member_of(state)
            if member is not None:
                by_member.setdefault(member, []).append(state.engine_request_id)
            state.abort()
            self._end(state)
        for member, engine_request_ids in by_member.items():
            try:
                if member.client is not None:
                    member.client.abort_requests(engine_request_ids)
            except ReplicaError:
                logger.debug(
                    "Replica %d died before it could abort %d requests.", member.replica_id, len(engine_request_ids)
                )

    def _accept(self, member: PoolMember, output: Any) -> bool:
        """Whether the output belongs to a current attempt on this replica; anything else is stale and dropped."""
        state = member.in_flight.get(output.request_id)
        if state is None:
            return False
        output.request_id = state.request_id
        finished = output.finish_reason is not None
        state.deliver(finished, cut_short=finished and self._api.cut_short(output))
        if state.finished:
            self._end(state)
        return True

    def _member_of(self, state: OrchestratorRequestState) -> PoolMember | None:
        return self.stage_pools[0].member(state.replica_id) if state.replica_id is not None else None

    def _end(self, state: OrchestratorRequestState) -> None:
        self.stage_pools[0].release(state)
        self.request_states.pop(state.request_id, None)

    def _fail(self, state: OrchestratorRequestState, error: OmniError) -> None:
        self.request_states.pop(state.request_id, None)
        self._hand_over(RequestFailed(state.request_id, error))

    def _hand_over(self, item: Any) -> None:
        try:
            self.output_async_queue.force_put(item)
        except HandoverClosedError:
            return
        if self.output_async_queue.full and self._throttle is None:
            self._throttle = asyncio.get_running_loop().create_task(self._wait_for_reader(), name="omni-throttle")

    async def _wait_for_reader(self) -> None:
        """Leave the replicas' outputs in their sockets until AsyncLLM has caught up."""
        try:
            for pool in self.stage_pools:
                for member in pool.members:
                    if member.client is not None:
                        member.client.pause_reading()
            await self.output_async_queue.wait_for_room()
        except HandoverClosedError:
            return
        finally:
            self._throttle = None
        for pool in self.stage_pools:
            for member in pool.members:
                if member.client is not None:
                    member.client.resume_reading()
