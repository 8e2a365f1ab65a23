"""The orchestrator: takes requests from AsyncLLM, gives each to a replica, brings the outputs back."""

import asyncio
from collections.abc import Callable
from typing import Any

from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.dispatcher import Dispatcher
from vllm_omni_plugin.orchestrator.fan_out import FanOut
from vllm_omni_plugin.orchestrator.handover import HandoverClosedError, HandoverQueue
from vllm_omni_plugin.orchestrator.membership import RemoteKeeper, ReplicaKeeper, change_membership, explain
from vllm_omni_plugin.orchestrator.messages import (
    AbortRequests,
    CallReplicas,
    Explain,
    ManageReplica,
    Membership,
    ReplicaJoined,
    ReplicaLeft,
    RpcMessage,
    SubmitRequest,
)
from vllm_omni_plugin.orchestrator.metrics import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.output_gate import OutputGate
from vllm_omni_plugin.orchestrator.request_api import RequestApi
from vllm_omni_plugin.orchestrator.request_state import OrchestratorRequestState
from vllm_omni_plugin.orchestrator.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.replicas.stage_client import StageClient

logger = init_logger(__name__)

MAX_QUEUED_REQUESTS = 4096
"""Requests handed over and not taken yet before AsyncLLM waits."""
MAX_QUEUED_OUTPUTS = 4096
"""Output messages AsyncLLM has not taken yet before the replicas' sockets are left unread."""


class Orchestrator:
    """Owns the requests and the pools. Everything but the queues belongs to the loop that runs `run`.

    Args:
        stage_pools: one pool per stage.
        api: see `RequestApi`.
        migration_limit: moves a request may make.
        clock: monotonic seconds.
        replica_wait: seconds that a request waits while no replica serves.

    Attributes:
        request_async_queue: `SubmitRequest` and `AbortRequests`, in order.
        output_async_queue: vLLM's `EngineCoreOutputs`, `RequestFailed`, `ReplicaJoined` and `ReplicaLeft`.
        rpc_async_queue: `CallReplicas`, changes of membership, `ManageReplica` among them, and `Explain`.
        local_replicas: keeps the replicas of this node; None without any.
        remote_replicas: keeps those of other processes; None in a head that nobody can join.
        on_serving: called on the loop after every step that lets a replica take requests.
        stage_pools: the pools; their `members` and `serving` may be read from any thread.
        async_chunk: whether a stage may start on parts of its input. With one stage there is nothing to overlap.
    """

    async_chunk = False

    def __init__(
        self,
        stage_pools: list[StagePool],
        api: RequestApi,
        migration_limit: int,
        clock: Callable[[], float],
        replica_wait: float = 60.0,
    ) -> None:
        self.stage_pools = stage_pools
        self.request_async_queue: HandoverQueue[SubmitRequest | AbortRequests] = HandoverQueue(MAX_QUEUED_REQUESTS)
        self.output_async_queue: HandoverQueue[Any] = HandoverQueue(MAX_QUEUED_OUTPUTS)
        self.rpc_async_queue: HandoverQueue[RpcMessage] = HandoverQueue(MAX_QUEUED_REQUESTS)
        self.metrics = OrchestratorMetrics()
        self.fan_out = FanOut(stage_pools, self.distrust)
        self.local_replicas: ReplicaKeeper | None = None
        self.remote_replicas: RemoteKeeper | None = None
        self.on_serving: Callable[[], None] = lambda: None
        self._api = api
        self._clock = clock
        self._gate = OutputGate(self.output_async_queue, stage_pools)
        self._dispatcher = Dispatcher(
            stage_pools[0], api, migration_limit, replica_wait, clock, self.metrics, self._gate.put
        )
        for pool in stage_pools:
            pool.on_serving = self._replica_began_to_serve

    @property
    def request_states(self) -> dict[str, OrchestratorRequestState]:
        """Unfinished requests by the client's id."""
        return self._dispatcher.states

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
                tasks.create_task(self.fan_out.serve(self.rpc_async_queue, self._change_membership), name="omni-calls")
        finally:
            self._gate.close()
            self._dispatcher.close()

    def close_queues(self) -> None:
        """End `run` and release everybody who waits on a queue. Idempotent, from any thread."""
        self.request_async_queue.close()
        for message in self.rpc_async_queue.close():
            if isinstance(message, CallReplicas | ManageReplica | Explain):
                message.reply.cancel()
        self.output_async_queue.close()

    def outputs_received(self, member: PoolMember, outputs: Any) -> None:
        """Outputs came from a replica: release what finished, restore the client's ids, hand them over."""
        kept = [output for output in outputs.outputs if self._dispatcher.accept(member, output)]
        self.stage_pools[member.stage_id].settle(member, self._api.load_report(outputs))
        outputs.outputs = kept
        outputs.engine_index = member.replica_id
        if kept or outputs.scheduler_stats is not None:
            self._gate.put(outputs)

    def replica_serves(
        self, member: PoolMember, client: StageClient, input_addr: str, output_addr: str, ready_response: bytes
    ) -> None:
        """A replica takes requests from now on, over this client, unless it is held back.

        Args:
            member: the replica.
            client: speaks to its engine.
            input_addr: where its requests go.
            output_addr: where its outputs come from.
            ready_response: what its engine said of itself when it was ready.
        """
        member.changed_at = self._clock()
        cache = self._api.cache_size(ready_response)
        self.stage_pools[member.stage_id].serve(member, client, input_addr, output_addr, cache)

    def replica_lost(self, member: PoolMember, reason: str, status: ReplicaStatus = ReplicaStatus.DOWN) -> None:
        """A replica is gone: its requests move or fail, each exactly once."""
        pool = self.stage_pools[member.stage_id]
        member.changed_at = self._clock()
        orphans = pool.lose(member, status)
        logger.error(
            "Replica %d of stage %d is lost (%s) with %d requests in flight.",
            member.replica_id,
            pool.stage_id,
            reason,
            len(orphans),
        )
        self._dispatcher.move(orphans, member, reason)
        self._gate.put(self._api.idle_report(member.replica_id))

    def replica_joined(self, member: PoolMember, ready_response: bytes) -> None:
        """A replica that was not there at the start is about to serve: tell AsyncLLM's side."""
        self._gate.put(ReplicaJoined(member.stage_id, member.replica_id, ready_response))

    def replica_left(self, member: PoolMember) -> None:
        """A lost replica does not come back: forget it, and tell AsyncLLM's side."""
        self.stage_pools[member.stage_id].remove(member)
        self._gate.put(ReplicaLeft(member.stage_id, member.replica_id))

    def distrust(self, member: PoolMember, reason: str) -> None:
        """Take out a replica that failed a call which others took, so that it starts afresh."""
        client = member.client
        if client is not None:
            self.replica_lost(member, reason, ReplicaStatus.ERROR)
            client.mark_dead(reason)

    def _replica_began_to_serve(self) -> None:
        self._dispatcher.replica_serves()
        self.on_serving()

    def _change_membership(self, message: Membership | Explain) -> None:
        if isinstance(message, Explain):
            explain(message, self.stage_pools)
        else:
            change_membership(message, self.stage_pools, self.local_replicas, self.remote_replicas)

    async def _serve_requests(self) -> None:
        while True:
            try:
                batch = await self.request_async_queue.get_batch()
            except HandoverClosedError:
                return
            for message in batch:
                if isinstance(message, SubmitRequest):
                    self._dispatcher.submit(message)
                else:
                    self._dispatcher.abort(message.request_ids)
