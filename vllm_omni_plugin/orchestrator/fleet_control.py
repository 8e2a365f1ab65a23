"""Runs an orchestrator, and handles all its messages but requests: operator calls, membership, other heads' work."""

import asyncio
from concurrent.futures import Future
from typing import Any

from vllm_omni_plugin.admission import config_changes
from vllm_omni_plugin.coordinator import ReplicaKey
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.attachment.remote_replicas import RemoteReplicas
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON
from vllm_omni_plugin.orchestrator.pool.work_exchange import HeadsUpdate, WorkExchange
from vllm_omni_plugin.orchestrator.requests import orchestrator_messages as messages
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError

logger = init_logger(__name__)


class FleetControl:
    """Runs an orchestrator, and handles the messages of its `rpc_async_queue`. Lives on the orchestrator's loop.

    Args:
        remote_replicas: the replicas of other processes; None in a fleet that nothing can join.
        exchange: the work of other heads; None likewise.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        fleet_calls: FleetCalls,
        remote_replicas: RemoteReplicas | None = None,
        exchange: WorkExchange | None = None,
    ) -> None:
        self._orchestrator = orchestrator
        self._pools = orchestrator.stage_pools
        self._fleet_calls = fleet_calls
        self._remote_replicas = remote_replicas
        self._exchange = exchange

    async def run(self) -> None:
        """Run the orchestrator and serve the queue until it is closed; then cancel open calls."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._orchestrator.run(), name="omni-requests")
                tasks.create_task(self._serve(), name="omni-calls")
        finally:
            if self._exchange is not None:
                self._exchange.close()
            await self._fleet_calls.close()

    async def _serve(self) -> None:
        """Do what operators want in tasks, begun in order; handle all other messages at once."""
        replies: dict[asyncio.Task[None], Future[Any]] = {}
        try:
            while True:
                for message in await self._orchestrator.rpc_async_queue.get_batch():
                    if isinstance(message, messages.OperatorMessage):
                        task = asyncio.create_task(self._answer(message), name="omni-operator-call")
                        replies[task] = message.reply
                        task.add_done_callback(replies.pop)
                    else:
                        self._handle(message)
        except QueueClosedError:
            pass
        finally:
            for task, reply in replies.items():
                task.cancel()
                reply.cancel()

    async def _answer(self, message: messages.OperatorMessage) -> None:
        reply: Future[Any] = message.reply
        try:
            result = await self._do(message)
        except Exception as error:
            if reply.set_running_or_notify_cancel():
                reply.set_exception(error)
        else:
            if reply.set_running_or_notify_cancel():
                reply.set_result(result)

    async def _do(self, message: messages.OperatorMessage) -> Any:
        match message:
            case messages.CallReplicas(method, args, _, stages):
                return await self._fleet_calls.call(method, args, range(len(self._pools)) if stages is None else stages)
            case messages.ManageReplica():
                return await self._manage(message)
            case messages.Explain():
                return self._orchestrator.explain(message)
            case messages.ReplaceAdmission(config):
                admission = self._orchestrator.admission
                assert admission is not None
                before = admission.config
                admission.replace(config)
                return config_changes(before, config)

    async def _manage(self, message: messages.ManageReplica) -> None:
        """Drain, resume or remove a replica, for all heads; a remote one only if they can be told."""
        try:
            member = self._pools[message.stage_id].member(message.replica_id)
        except LookupError:
            raise ReplicaError(f"stage {message.stage_id} has no replica {message.replica_id}") from None
        key, refusal = ReplicaKey.of(member), self._fleet_calls.session.refusal
        if member.remote and refusal is not None:
            raise refusal
        if message.action == "drain":
            self._orchestrator.cordon(member, ADMIN_CORDON)
        elif message.action == "resume":
            self._orchestrator.uncordon(member, ADMIN_CORDON)
        else:
            assert member.leave is not None
            member.leave()
        if member.remote:
            await self._fleet_calls.manage(message.action, key)

    def _handle(
        self, message: messages.RegisterRemoteReplica | messages.UnregisterRemoteReplica | messages.CoordinatorMessage
    ) -> None:
        try:
            match message:
                case messages.RegisterRemoteReplica():
                    assert self._remote_replicas is not None
                    self._remote_replicas.register(message)
                case messages.UnregisterRemoteReplica():
                    assert self._remote_replicas is not None
                    self._remote_replicas.unregister(message)
                case _:
                    if isinstance(message, HeadsUpdate):
                        self._update_other_heads(message)
                    self._fleet_calls.handle(message)
        except Exception:
            logger.exception("A message could not be handled: %r", message)

    def _update_other_heads(self, message: HeadsUpdate) -> None:
        assert self._exchange is not None
        others_work = self._exchange.handle(message)
        for pool in self._pools:
            pool.unreported.set_heads(self._exchange.heads)
        for member, work in others_work:
            self._orchestrator.update_other_heads_work(member, work)
