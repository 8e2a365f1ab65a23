"""Runs an orchestrator, and handles all its messages but requests: operator calls, membership, other heads' work."""

import asyncio
from concurrent.futures import Future
from typing import Any

from vllm_omni_plugin.admission import config_changes
from vllm_omni_plugin.coordinator import ReplicaKey
from vllm_omni_plugin.errors import OmniError, ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.attachment.remote_replicas import RemoteReplicas
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON
from vllm_omni_plugin.orchestrator.pool.work_exchange import HeadsUpdate, WorkExchange
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    CallReplicas,
    CoordinatorMessage,
    Explain,
    ManageReplica,
    RegisterRemoteReplica,
    ReplaceAdmission,
    UnregisterRemoteReplica,
)
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
                    if not isinstance(message, CallReplicas | ManageReplica):
                        self._handle(message)
                        continue
                    name = message.method if isinstance(message, CallReplicas) else message.action
                    task = asyncio.create_task(self._answer(message), name=f"omni-call-{name}")
                    replies[task] = message.reply
                    task.add_done_callback(replies.pop)
        except QueueClosedError:
            pass
        finally:
            for task, reply in replies.items():
                task.cancel()
                reply.cancel()

    async def _answer(self, message: CallReplicas | ManageReplica) -> None:
        reply: Future[Any] = message.reply
        result = None
        try:
            if isinstance(message, CallReplicas):
                stages = range(len(self._pools)) if message.stages is None else message.stages
                result = await self._fleet_calls.call(message.method, message.args, stages)
            else:
                await self._manage(message)
        except Exception as error:
            if reply.set_running_or_notify_cancel():
                reply.set_exception(error)
        else:
            if reply.set_running_or_notify_cancel():
                reply.set_result(result)

    async def _manage(self, message: ManageReplica) -> None:
        try:
            member = self._pools[message.stage_id].member(message.replica_id)
        except LookupError:
            raise ReplicaError(f"stage {message.stage_id} has no replica {message.replica_id}") from None
        key, refusal = ReplicaKey.of(member), self._fleet_calls.refusal
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
        self,
        message: RegisterRemoteReplica | UnregisterRemoteReplica | Explain | ReplaceAdmission | CoordinatorMessage,
    ) -> None:
        reply = message.reply if isinstance(message, Explain | ReplaceAdmission) else None
        if reply is not None and not reply.set_running_or_notify_cancel():
            return
        try:
            match message:
                case Explain():
                    message.reply.set_result(self._orchestrator.explain(message))
                case ReplaceAdmission():
                    admission = self._orchestrator.admission
                    assert admission is not None
                    before = admission.config
                    admission.replace(message.config)
                    message.reply.set_result(config_changes(before, message.config))
                case RegisterRemoteReplica() | UnregisterRemoteReplica():
                    self._update_remote(message)
                case _:
                    self._handle_coordinator_message(message)
        except Exception as error:
            if reply is None or not isinstance(error, OmniError):
                logger.exception("A message could not be handled: %r", message)
            if reply is not None and not reply.done():
                reply.set_exception(error)

    def _update_remote(self, message: RegisterRemoteReplica | UnregisterRemoteReplica) -> None:
        if self._remote_replicas is None:
            logger.error("A head without --omni-master-address cannot take remote replicas: %r", message)
        elif isinstance(message, RegisterRemoteReplica):
            self._remote_replicas.register(message)
        else:
            self._remote_replicas.unregister(message)

    def _handle_coordinator_message(self, message: CoordinatorMessage) -> None:
        assert self._exchange is not None
        if isinstance(message, HeadsUpdate):
            others_work = self._exchange.handle(message)
            for pool in self._pools:
                pool.unreported.set_heads(self._exchange.heads)
            for member, work in others_work:
                self._orchestrator.update_other_heads_work(member, work)
        self._fleet_calls.handle(message)
