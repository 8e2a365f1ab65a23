"""Keeps the replicas of this node running: first start, watch, restart with back-off, end."""

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.stage_pool import PoolMember
from vllm_omni_plugin.replicas.backoff import RestartBackoff
from vllm_omni_plugin.replicas.engine_start import GroupedLauncher, Launcher
from vllm_omni_plugin.replicas.local import LocalReplica, start_local_replica
from vllm_omni_plugin.replicas.stage_client import Codec

logger = init_logger(__name__)


class LocalReplicas:
    """The replicas of one stage that the head runs itself. Lives on the orchestrator's loop.

    Args:
        orchestrator: gets their outputs and learns of their deaths.
        stage_id: stage they serve.
        count: how many, with ids from 0.
        launcher: starts engines.
        codec: see `StageClient`.
        clock: monotonic seconds.
        heartbeat_interval: seconds between questions to each engine whether it still answers.
        heartbeat_timeout: seconds without an answer after which it hangs; see `Probe`.
        delay: sleeps between restarts.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        stage_id: int,
        count: int,
        launcher: Launcher,
        codec: Codec,
        clock: Callable[[], float],
        heartbeat_interval: float,
        heartbeat_timeout: float,
        delay: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._orchestrator = orchestrator
        self._pool = orchestrator.stage_pools[stage_id]
        self._members = [self._pool.add(replica_id) for replica_id in range(count)]
        self._launcher = launcher
        self._codec = codec
        self._clock = clock
        self._heartbeats = heartbeat_interval, heartbeat_timeout
        self._delay = delay
        # Two blocking steps per replica may run at once: the old engine's end and the new one's start.
        self._executor = ThreadPoolExecutor(max_workers=2 * max(count, 1), thread_name_prefix="omni-engine")
        self._running: dict[int, LocalReplica] = {}
        self._died: dict[int, asyncio.Event] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._leaving: set[asyncio.Task[None]] = set()
        self._closing = False
        self._restarting = True

    async def start(self) -> list[bytes]:
        """Start all replicas at once and return their ready responses, in order, when all serve.

        Raises:
            ReplicaError: one did not start; call `close`, which ends the others.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                starts = [tasks.create_task(self._bring_up(member)) for member in self._members]
        except ExceptionGroup as errors:
            raise self._named(errors.exceptions[0]) from errors
        self._keepers = [
            asyncio.create_task(self._keep(member), name=f"omni-replica-{member.name}") for member in self._members
        ]
        return [start.result().ready_response for start in starts]

    def leave(self, member: PoolMember) -> None:
        """End a replica for good: its requests move, its engine ends, its id becomes free. Returns at once.

        The other ranks of a lockstep group end with it, since they cannot compute without it.
        """
        if isinstance(self._launcher, GroupedLauncher):
            for replica_id in self._launcher.group_of(member.replica_id):
                self._leave(self._members[replica_id])
        else:
            self._leave(member)

    def restart_no_more(self) -> None:
        """Engines that end from here on stay away, since all of them are about to."""
        self._restarting = False

    def _leave(self, member: PoolMember) -> None:
        keeper = self._keepers[member.replica_id]
        keeper.cancel()
        if member.client is not None:
            self._orchestrator.replica_lost(member, "it was removed")
        self._orchestrator.replica_left(member)
        leaving = asyncio.create_task(self._retire(member, keeper), name=f"omni-leave-{member.name}")
        self._leaving.add(leaving)
        leaving.add_done_callback(self._leaving.discard)

    async def close(self, timeout: float | None = None) -> None:
        """End all engines in parallel, giving each `timeout` seconds (None: vLLM's default). Idempotent."""
        self._closing = True
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, *self._leaving, return_exceptions=True)
        running, self._running = list(self._running.values()), {}
        await asyncio.gather(*(replica.close(self._executor, timeout) for replica in running), return_exceptions=True)
        self._executor.shutdown(wait=False)

    def _named(self, error: Exception) -> Exception:
        """The error of a start, with its stage where there are several."""
        if self._orchestrator.num_stages == 1 or not isinstance(error, ReplicaError):
            return error
        return ReplicaError(f"stage {self._pool.stage_id}: {error}")

    async def _bring_up(self, member: PoolMember) -> LocalReplica:
        """Start a replica, tell it what the others were told, and let it serve."""
        died = self._died[member.replica_id] = asyncio.Event()
        replica = await start_local_replica(
            self._launcher,
            self._codec,
            self._executor,
            member.replica_id,
            partial(self._orchestrator.outputs_received, member),
            partial(self._on_dead, member, died),
            member.stage_id,
        )
        self._running[member.replica_id] = replica
        await self._let_serve(member, replica)
        replica.watch(
            *self._heartbeats, self._clock, partial(self._hangs, member), partial(self._let_serve, member, replica)
        )
        return replica

    async def _let_serve(self, member: PoolMember, replica: LocalReplica) -> None:
        await self._orchestrator.admit(member, replica.client, replica.ready_response)
        if self._died[member.replica_id].is_set():
            raise ReplicaError(f"replica {member.name} died as soon as it was ready")
        if member not in self._pool.members:
            raise ReplicaError(f"replica {member.name} was removed")
        self._orchestrator.replica_serves(
            member, replica.client, replica.input_addr, replica.output_addr, replica.ready_response
        )
        if self._pool.follows_caches:
            replica.follow_cache(partial(self._pool.cache_changed, member))
        logger.info(
            "Replica %d of stage %d serves (engine process %d).", member.replica_id, member.stage_id, replica.pid
        )

    def _hangs(self, member: PoolMember, reason: str) -> None:
        if not self._closing and member.client is not None:
            self._orchestrator.replica_lost(member, reason, ReplicaStatus.ERROR)

    def _on_dead(self, member: PoolMember, died: asyncio.Event, reason: str) -> None:
        died.set()
        if not self._closing and member.client is not None:
            self._orchestrator.replica_lost(member, reason)

    async def _keep(self, member: PoolMember) -> None:
        """Restart a replica whenever it dies, with a growing pause while it keeps dying."""
        backoff = RestartBackoff()
        served_since = self._clock()
        while True:
            await self._died[member.replica_id].wait()
            lived = self._clock() - served_since
            await self._end(member)
            while await self._may_restart(member, backoff.after(lived)):
                member.restarts += 1
                try:
                    await self._bring_up(member)
                    break
                except Exception as error:
                    # Whatever went wrong, a replica that is given up here would never be started again.
                    logger.error(
                        "Replica %d of stage %d did not come back: %s", member.replica_id, member.stage_id, error
                    )
                    await self._end(member)
                    lived = 0.0
            else:
                return
            served_since = self._clock()

    async def _may_restart(self, member: PoolMember, pause: float) -> bool:
        """Wait before a restart; returns whether there is to be one."""
        if self._restarting:
            logger.warning("Replica %d of stage %d starts again in %.0f s.", member.replica_id, member.stage_id, pause)
            await self._delay(pause)
        return self._restarting

    async def _retire(self, member: PoolMember, keeper: "asyncio.Task[None]") -> None:
        # It may be in the middle of a start, which then leaves nothing or a replica to end.
        await asyncio.wait([keeper])
        await self._end(member)

    async def _end(self, member: PoolMember) -> None:
        """Reap what is left of a replica that is not coming back."""
        replica = self._running.pop(member.replica_id, None)
        if replica is None:
            return
        try:
            await replica.close(self._executor, timeout=0.0)
        except Exception:
            # It has been killed all the same, and is to be started again.
            logger.exception("What is left of replica %s could not be ended in order.", member.name)
