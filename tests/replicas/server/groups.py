"""A lockstep group over three machines with two ranks each, whose engines are not processes."""

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial

from tests.fakes.conditions import eventually
from tests.fakes.engines import FakeProcess
from tests.fakes.free_ports import free_port
from tests.replicas.server.engines import ServedFakeLauncher
from vllm_omni_plugin.errors import OmniError, ReplicaError
from vllm_omni_plugin.replicas.machines.group_leader import leading
from vllm_omni_plugin.replicas.machines.group_machine import GroupMachine, RanksLauncher
from vllm_omni_plugin.replicas.machines.meetings import setup_of
from vllm_omni_plugin.replicas.machines.other_machine import MachineSettings, exit_of

MACHINES, RANKS = 3, 2


class FakeCoordination(FakeProcess):
    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.port = number
        self.addresses = [f"in {number}", f"out {number}"]

    def end(self) -> None:
        self.kill()


@dataclass
class FakeRanksLauncher(ServedFakeLauncher):
    """Starts the ranks of one machine. `met` has the coordinations of its meetings; `slow_end` holds up their end."""

    meeting_address: tuple[str, int] = ("127.0.0.1", 0)
    machines: int = MACHINES
    ranks: int = RANKS
    layout: Mapping[str, str] = field(default_factory=lambda: {"--data-parallel-size": "6"})
    coordinations: list[FakeCoordination] = field(default_factory=list)
    met: list[tuple[int, Sequence[str]]] = field(default_factory=list)
    slow_end: threading.Event = field(default_factory=threading.Event)
    not_coordinated: int = 0

    def coordinate(self) -> FakeCoordination:
        if self.not_coordinated:
            self.not_coordinated -= 1
            raise ReplicaError("vLLM's coordinator did not start")
        self.coordinations.append(FakeCoordination(len(self.coordinations) + 1))
        return self.coordinations[-1]

    def meet_in(self, meeting: int, port: int, coordinator: Sequence[str]) -> None:
        self.met.append((port, coordinator))

    def end_ranks(self) -> None:
        self.slow_end.wait(30)

    def close(self) -> None:
        super().close()
        for coordination in self.coordinations:
            coordination.die()
            os.close(coordination.sentinel)


class Machine:
    """One machine, whose ranks wait for the next meeting as soon as they have ended.

    It drains at once, or later if it `is_busy`. Ranks that are `late` come with `start_rank`.
    """

    def __init__(self, rank: int, port: int, late: int = 0) -> None:
        self.launcher = FakeRanksLauncher(meeting_address=("127.0.0.1", port))
        self.launcher.slow_end.set()
        assert isinstance(self.launcher, RanksLauncher)
        setup = setup_of({}, self.launcher.layout)
        settings = MachineSettings(rank, f"10.0.0.{rank}", f"tcp://127.0.0.1:{port}", setup, None, 0.05, 10.0)
        self._executor = ThreadPoolExecutor(2 * RANKS + 3)
        lead = partial(leading, settings, self.launcher, self._executor, time.monotonic) if rank == 0 else nullcontext
        self.reasons: list[str] = []
        self.is_busy = self.draining = False
        self.machine = GroupMachine(settings, self.launcher, self._executor, time.monotonic, self._drain, lead)
        self.running = asyncio.create_task(self.machine.run(60.0))
        self._ranks: list[asyncio.Task[None]] = []
        for _ in range(RANKS - late):
            self.start_rank()

    def start_rank(self) -> None:
        self._ranks.append(asyncio.create_task(self._rank(len(self._ranks))))

    @property
    def alive(self) -> list[FakeProcess]:
        return [engine.process for engine in self.launcher.engines if not engine.ended]

    def kill(self) -> None:
        """As SIGKILL of its command does, which its ranks end with."""
        self.running.cancel()
        for task in self._ranks:
            task.cancel()

    async def close(self) -> None:
        self.launcher.slow_end.set()
        self.kill()
        with suppress(asyncio.CancelledError, OmniError):
            await self.running
        await asyncio.wait(self._ranks)
        self._executor.shutdown()
        self.launcher.close()

    def _drain(self) -> None:
        if not self.draining and not self.is_busy:
            self.draining = True
            for task in self._ranks:
                task.cancel()

    async def _rank(self, index: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with suppress(ReplicaError):
                async with self.machine.turn(index):
                    process = await loop.run_in_executor(self._executor, self.machine.start, index)
                try:
                    await exit_of(process)
                    self.reasons.append(process.exit_reason())
                    await loop.run_in_executor(self._executor, process.shutdown, 0.0)
                except asyncio.CancelledError:
                    await loop.run_in_executor(self._executor, process.shutdown, None if self.draining else 0.0)
                    raise


class Group:
    def __init__(self) -> None:
        self.port = free_port()
        self.machines: dict[int, Machine] = {}
        self._former: list[Machine] = []

    def start(self, rank: int, late: int = 0) -> Machine:
        if rank in self.machines:
            self._former.append(self.machines[rank])
        self.machines[rank] = Machine(rank, self.port, late)
        return self.machines[rank]

    async def met(self, after: int = 0) -> int:
        """The number of the meeting in which all ranks compute, a later one than `after`."""

        def number() -> int:
            met = {machine.launcher.met[-1][0] if machine.launcher.met else 0 for machine in self.machines.values()}
            all_run = all(len(machine.alive) == RANKS for machine in self.machines.values())
            return met.pop() if all_run and len(met) == 1 and len(self.machines) == MACHINES and max(met) > after else 0

        return await eventually(number, "all ranks of all machines compute together")

    async def close(self) -> None:
        for machine in (*self._former, *self.machines.values()):
            await machine.close()
