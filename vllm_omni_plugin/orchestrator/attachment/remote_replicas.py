"""The replicas of other processes: this head attaches to those that the coordinator lists."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial

from msgspec.structs import replace

from vllm_omni_plugin.coordinator import ReplicaInfo, ReplicaKey
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.attachment.remote_keeper import RemoteReplicaKeeper
from vllm_omni_plugin.orchestrator.event_log import EventKind
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON, PoolMember
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import RegisterRemoteReplica, UnregisterRemoteReplica
from vllm_omni_plugin.replicas.remote.remote_replica import (
    AttachRefusedError,
    AttachRemote,
    AttachSettings,
    RemoteReplica,
    attach_remote,
)

logger = init_logger(__name__)

MAX_ATTACHING = 256
"""Attempts at once. Each blocks the loop for a third of a millisecond to open its sockets."""


class RemoteReplicas:
    """All listed replicas. Lives on the orchestrator's loop. `close` terminates the context of the settings."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        fleet_calls: FleetCalls,
        settings: AttachSettings,
        *,
        attach: AttachRemote = attach_remote,
        delay: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._orchestrator = orchestrator
        self._fleet_calls = fleet_calls
        self._settings = settings
        self._attach = attach
        self._delay = delay
        self._keepers: dict[ReplicaKey, RemoteReplicaKeeper] = {}
        self._tasks: dict[RemoteReplicaKeeper, asyncio.Task[None]] = {}
        self._attaching = asyncio.Semaphore(MAX_ATTACHING)
        self._refusing: set[asyncio.Task[None]] = set()
        # The incarnations of replicas that were removed or refused. The coordinator may still list them.
        self._dismissed: dict[ReplicaKey, int] = {}
        self._closed = False

    def register(self, message: RegisterRemoteReplica) -> None:
        """A replica is listed, or its row has changed. Rows of one that was removed are ignored until it restarts."""
        info, key = message.info, ReplicaKey.of(message.info)
        if self._closed or info.incarnation <= self._dismissed.get(key, -1):
            return
        self._dismissed.pop(key, None)
        keeper = self._keepers.get(key)
        if keeper is not None:
            keeper.update(info, message.accepts)
        elif info.stage_id < self._orchestrator.num_stages:
            self._begin_to_attach(key, message)
        else:
            self._dismissed[key] = info.incarnation
            task = asyncio.get_running_loop().create_task(self._refuse(info), name="omni-refuse")
            self._refusing.add(task)
            task.add_done_callback(self._refusing.discard)

    def unregister(self, message: UnregisterRemoteReplica) -> None:
        """A replica is not listed any more: it goes now or, since the coordinator may be wrong, when its lease ends."""
        key = ReplicaKey.of(message)
        self._dismissed.pop(key, None)
        keeper = self._keepers.get(key)
        if keeper is None:
            return
        if keeper.attached is None:
            self._forget(key, message.reason)
        else:
            keeper.unlisted = True
            logger.info("Replica %s: %s; it serves while its own server answers.", keeper.member.name, message.reason)

    def leave(self, member: PoolMember) -> None:
        """End the engine of an attached replica (else ReplicaError) for good; its requests move. Returns at once."""
        key = ReplicaKey.of(member)
        keeper = self._keepers.get(key)
        if keeper is None or (replica := keeper.attached) is None:
            raise ReplicaError(
                f"replica {member.name} is not attached now, so it cannot be removed: wait until it is up"
            )
        replica.request_drain()
        self._dismissed[key] = max(keeper.info.incarnation, replica.incarnation)
        self._forget(key, "it was removed", logging.INFO)

    async def close(self) -> None:
        """Detach from all. Idempotent."""
        # A later attachment would never be closed, and `term` would wait for its sockets.
        self._closed = True
        self._keepers.clear()
        tasks = [*self._tasks.values(), *self._refusing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # Waits up to half a second until the nodes have been notified.
        await asyncio.to_thread(self._settings.context.term)

    async def _refuse(self, info: ReplicaInfo) -> None:
        """Attach to a replica of an unknown stage, so that its node refuses this head and both log the reason."""
        ours = replace(info, stage_id=self._orchestrator.num_stages - 1)
        try:
            async with self._attaching:
                (await self._attach(ours, -1, self._settings, lambda outputs: None, lambda status: None)).close()
        except ReplicaError as error:
            if not isinstance(error, AttachRefusedError):
                self._dismissed.pop(ReplicaKey.of(info), None)
            self._orchestrator.events.record(EventKind.REFUSE, str(error), stage=info.stage_id, level=logging.ERROR)

    def _begin_to_attach(self, key: ReplicaKey, message: RegisterRemoteReplica) -> None:
        """Begin to attach to a listed replica, under the coordinator's id if it is free; cordon a drained one."""
        info = message.info
        # All heads use the coordinator's id, unless a replica of this head has the same id.
        member = self._orchestrator.stage_pools[info.stage_id].add(info.replica_id if info.replica_id >= 0 else None)
        member.remote, member.leave = True, partial(self.leave, member)
        member.input_addr, member.output_addr = info.input_addr, info.output_addr
        if key in self._fleet_calls.state.drained:
            self._orchestrator.cordon(member, ADMIN_CORDON)
        keeper = self._keepers[key] = RemoteReplicaKeeper(
            self._orchestrator,
            self._fleet_calls,
            member,
            info,
            accepts=message.accepts,
            clock=self._settings.clock,
            delay=self._delay,
            on_gone=partial(self._forget, key, "it is not listed, and its lease has ended"),
        )
        task = asyncio.get_running_loop().create_task(
            keeper.run(partial(self._open, keeper)), name=f"omni-replica-{member.name}"
        )
        self._tasks[keeper] = task
        task.add_done_callback(lambda _: self._tasks.pop(keeper))

    def _forget(self, key: ReplicaKey, reason: str, level: int | None = None) -> None:
        """Remove a replica: its requests move, and its id is freed."""
        keeper = self._keepers.pop(key, None)
        if keeper is None:
            return
        keeper.unlisted = False
        member = keeper.member
        if member.client is not None:
            self._orchestrator.replica_lost(member, reason, level=level)
        # The cancelled task closes the attachment.
        self._tasks[keeper].cancel()
        self._orchestrator.replica_left(member)
        if keeper.joined:
            self._orchestrator.events.record(EventKind.DETACH, reason, member)

    async def _open(self, keeper: RemoteReplicaKeeper, stage_id: int, replica_id: int) -> RemoteReplica:
        async with self._attaching:
            return await self._attach(keeper.info, replica_id, self._settings, keeper.on_outputs, keeper.on_status)
