"""What stands for an engine over three machines; run as a program it is another machine: RANK FIRST INTERVAL TIMEOUT.

The program prints when its workers start and end.
"""

import asyncio
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field

from tests.fakes.free_ports import free_port
from tests.replicas.server.conftest import FINGERPRINT
from tests.replicas.server.engines import ServedFakeEngine, ServedFakeLauncher
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.control.control_link import ControlServer
from vllm_omni_plugin.replicas.control.lease_messages import MachineReport, MeetingPlan, ToServer
from vllm_omni_plugin.replicas.machines.meeting_host import listen_for_machines
from vllm_omni_plugin.replicas.machines.meetings import setup_of
from vllm_omni_plugin.replicas.machines.other_machine import MachineSettings, OtherMachine
from vllm_omni_plugin.replicas.replica_server.node import run_machine

LAYOUT = {"--tensor-parallel-size": "24"}


class LoadingEngine(ServedFakeEngine):
    """Is never ready."""

    def wait(self, input_addr: str, output_addrs: Sequence[str]) -> None:
        assert self.signals.get(timeout=30) == "ended"
        raise ReplicaError("the engine did not start")


@dataclass
class MachinesFakeLauncher(ServedFakeLauncher):
    """A `MachinesLauncher`. `ports` are those of the meetings."""

    loads_for_ever: bool = False

    machines: int = 3
    meeting_address: tuple[str, int] = field(default_factory=lambda: ("127.0.0.1", free_port()))
    layout: Mapping[str, str] = field(default_factory=lambda: dict(LAYOUT))
    ports: list[int] = field(default_factory=list)

    def next_start(self, replica_id: int) -> tuple[int, int]:
        return 5, len(self.engines)

    def start(self, replica_id: int) -> ServedFakeEngine:
        if not self.loads_for_ever:
            return super().start(replica_id)
        self.engines.append(LoadingEngine(1000, self.identity(replica_id)))
        return self.engines[-1]

    def meet_at(self, port: int) -> None:
        self.ports.append(port)


class FakeWorkers:
    """Implements `Workers`. `may_end` holds up its end."""

    def __init__(self, plan: MeetingPlan) -> None:
        self.plan = plan
        self.reason = ""
        self.may_end = threading.Event()
        self.may_end.set()
        self.ended = False
        self.sentinel, self._alive_end = os.pipe()
        self._is_alive = True

    def exit_reason(self) -> str:
        return self.reason

    def die(self, reason: str = "") -> None:
        self.reason = self.reason or reason
        if self._is_alive:
            self._is_alive = False
            os.close(self._alive_end)

    def end(self) -> None:
        self.die("it was ended")
        self.may_end.wait(30)
        self.ended = True


class PrintingWorkers(FakeWorkers):
    def __init__(self, plan: MeetingPlan) -> None:
        super().__init__(plan)
        sys.stdout.write(f"started {plan.meeting}\n")
        sys.stdout.flush()

    def end(self) -> None:
        super().end()
        sys.stdout.write(f"ended {self.plan.meeting}\n")
        sys.stdout.flush()


@asynccontextmanager
async def played_first_machine(
    address: tuple[str, int], answers: Callable[[MachineReport], Iterable[MeetingPlan]]
) -> AsyncIterator[list[MachineReport]]:
    """A first machine with these answers to reports, which it yields."""
    reports: list[MachineReport] = []

    def answer(peer: bytes, report: ToServer) -> None:
        assert isinstance(report, MachineReport)
        reports.append(report)
        for plan in answers(report):
            control.send(peer, plan)

    with closing(listen_for_machines(address)) as listener:
        control = ControlServer(listener, None, answer)
        try:
            yield reports
        finally:
            control.close(0.0)


async def main(rank: str, first: str, interval: str, timeout: str) -> None:
    setup = setup_of(FINGERPRINT, LAYOUT)
    settings = MachineSettings(int(rank), f"10.0.0.{rank}", first, setup, None, float(interval), float(timeout))
    with ThreadPoolExecutor(2) as executor:
        await run_machine(OtherMachine(settings, PrintingWorkers, executor, time.monotonic), 0.0, 60.0)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
