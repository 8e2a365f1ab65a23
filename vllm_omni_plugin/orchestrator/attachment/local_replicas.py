"""The replicas that the head runs itself, on its own node."""

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.coordinator.protocol.fleet_state import NOTHING_TOLD
from vllm_omni_plugin.errors import AdapterFilesError, ReplicaError
from vllm_omni_plugin.orchestrator.event_log import EventKind
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.replicas.engine.engine_keeper import EngineKeeper, FirstStarts, Timing
from vllm_omni_plugin.replicas.engine.engine_start import GroupedLauncher, Launcher
from vllm_omni_plugin.replicas.engine.running_engine import Engine, start_local_engine
from vllm_omni_plugin.replicas.links.engine_client import Codec

_ADAPTER_PAUSE_S = 5.0
"""Pause before the files of adapters are looked at again."""


@dataclass(frozen=True)
class LocalStage:
    """The local replicas of one stage; their ids are 0 to `count` - 1."""

    stage_id: int
    count: int
    launcher: Launcher
    codec: Codec


class LocalReplicas:
    """Keeps the local replicas of all stages in service, with an `EngineKeeper` each, on the orchestrator's loop."""

    def __init__(self, orchestrator: Orchestrator, stages: Sequence[LocalStage], timing: Timing) -> None:
        self._orchestrator = orchestrator
        self._stages = {stage.stage_id: stage for stage in stages}
        self._timing = timing
        count = sum(stage.count for stage in stages)
        # Two threads each: a replica may be ended while another thread still waits for its start to fail.
        self._executor = ThreadPoolExecutor(2 * max(count, 1), thread_name_prefix="omni-engine")
        self._keepers: dict[PoolMember, EngineKeeper[Engine]] = {}
        self._running: list[asyncio.Future[None]] = []
        for stage in stages:
            first_starts = FirstStarts(stage.count)
            for replica_id in range(stage.count):
                member = orchestrator.stage_pools[stage.stage_id].add(replica_id)
                member.leave = partial(self.leave, member)
                self._keepers[member] = self._keeper(member, stage, first_starts)

    async def start(self) -> list[list[bytes]]:
        """Start all replicas at once and return the ready responses of those that serve, by stage.

        One that does not start is tried again, if another one of its stage serves. If none does, all others are ended,
        which `close` waits for, and ReplicaError is raised.
        """
        for keeper in self._keepers.values():
            keeper.begin()
            self._running.append(keeper.running)
        started: list[list[bytes]] = [[] for _ in self._stages]
        try:
            for keeper in self._keepers.values():
                await self._first_start(keeper)
        except BaseException:
            for keeper in self._keepers.values():
                keeper.stop(0.0)
            raise
        for member, keeper in self._keepers.items():
            if keeper.ready.done():
                started[member.stage_id].append(keeper.ready.result())
        return started

    def leave(self, member: PoolMember) -> None:
        """End a replica for good, and its lockstep group: requests move, ids are freed. Returns at once."""
        launcher = self._stages[member.stage_id].launcher
        group = launcher.group_of(member.replica_id) if isinstance(launcher, GroupedLauncher) else (member.replica_id,)
        for rank in [each for each in self._keepers if each.stage_id == member.stage_id and each.replica_id in group]:
            self._keepers.pop(rank).stop(0.0)
            if rank.client is not None:
                self._orchestrator.replica_lost(rank, "it was removed", level=logging.INFO)
            self._orchestrator.replica_left(rank)
            self._orchestrator.events.record(EventKind.DETACH, "it was removed", rank)

    def disable_restarts(self) -> None:
        """Restart no engine from now on, because all of them are about to end."""
        for keeper in self._keepers.values():
            keeper.disable_restarts()

    async def close(self, timeout: float | None = None) -> None:
        """End all engines in parallel, giving each `timeout` seconds (None: 15). Idempotent."""
        for keeper in self._keepers.values() if self._running else ():
            keeper.stop(timeout)
        await asyncio.gather(*self._running, return_exceptions=True)
        self._executor.shutdown(wait=False)

    def _keeper(self, member: PoolMember, stage: LocalStage, first_starts: FirstStarts) -> EngineKeeper[Engine]:
        return EngineKeeper(
            member.name,
            partial(self._start, member, stage),
            partial(self._serve, member, first_starts),
            partial(self._withdraw, member),
            partial(self._restarts, member),
            self._executor,
            self._timing,
            partial(first_starts.failed, member),
        )

    async def _start(self, member: PoolMember, stage: LocalStage) -> Engine:
        member.restarts += self._keepers[member].tried.done()
        return await start_local_engine(
            stage.launcher,
            stage.codec,
            self._executor,
            member.replica_id,
            partial(self._orchestrator.outputs_received, member),
            stage_id=stage.stage_id,
        )

    async def _first_start(self, keeper: EngineKeeper[Engine]) -> None:
        """Wait for the first start of an engine; raises if any stage has failed to start."""
        awaited: list[asyncio.Future[Any]] = [keeper.tried, *self._running]
        await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
        for member, other in self._keepers.items():
            if other.running.done():
                error = other.running.exception() or ReplicaError("it ended before all others were ready")
                if self._orchestrator.num_stages > 1 and isinstance(error, ReplicaError):
                    raise ReplicaError(f"stage {member.stage_id}: {error}") from error
                raise error

    async def _serve(self, member: PoolMember, first_starts: FirstStarts, engine: Engine) -> None:
        """Put an engine into service, brought up to date; one that hung aborts its former requests first."""
        sleeps = False
        if not engine.client.is_interrupted:
            member.told = NOTHING_TOLD
        else:
            await engine.client.reset()
            sleeps = await engine.client.call("is_sleeping") is True
        # They are its engine's name, see `PoolMember.engine_key`.
        member.input_addr, member.output_addr = engine.input_addr, engine.output_addr
        await self._prepare(member, engine, sleeps)
        if engine.lost.done():
            raise ReplicaError(f"replica {member.name} died as soon as it was ready")
        self._orchestrator.replica_serves(
            member, engine.client, engine.input_addr, engine.output_addr, engine.ready_response
        )
        first_starts.succeeded()
        pool = self._orchestrator.stage_pools[member.stage_id]
        if pool.follows_caches:
            engine.subscribe_cache(partial(pool.cache_changed, member))
        self._orchestrator.events.record(EventKind.ATTACH, f"engine process {engine.pid}", member)

    async def _prepare(self, member: PoolMember, engine: Engine, sleeps: bool) -> None:
        """Bring a replica up to date. Without the files of its adapters it waits, for a new engine would not help."""
        logged = ""
        while True:
            try:
                await self._orchestrator.prepare_replica(member, engine.client, engine.ready_response, sleeps)
                return
            except AdapterFilesError as error:
                if str(error) != logged:
                    logged = str(error)
                    self._orchestrator.events.record(EventKind.REFUSE, logged, member)
            pause: asyncio.Future[Any] = asyncio.ensure_future(self._timing.delay(_ADAPTER_PAUSE_S))
            try:
                await asyncio.wait({pause, engine.lost}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                pause.cancel()
            if engine.lost.done():
                raise ReplicaError(engine.lost.result())

    def _restarts(self, member: PoolMember, seconds: float, reason: str | Exception) -> None:
        self._orchestrator.events.record(EventKind.RESTART, f"in {seconds:.0f} s: {reason}", member)

    def _withdraw(self, member: PoolMember, engine: Engine, reason: str, hangs: bool) -> None:
        """Take an engine out of service; a hung one is kept, and may answer again."""
        if member.client is not None:
            self._orchestrator.replica_lost(member, reason, ReplicaStatus.ERROR if hangs else ReplicaStatus.DOWN)
        if hangs:
            engine.client.interrupt(reason)
