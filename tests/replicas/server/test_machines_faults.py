"""The machines of a replica as processes, with fakes of engine and workers: one is stopped, killed, or cut off."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.engine.namespaces import NEEDS_NAMESPACES, at, ip
from tests.fakes.conditions import eventually
from tests.fakes.free_ports import free_port
from tests.fakes.keeping import Keep
from tests.replicas.server.conftest import Node, StartNode
from tests.replicas.server.machines import FakeWorkers, MachinesFakeLauncher, played_first_machine
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.replicas.control.lease_messages import MachineReport, MeetingPlan
from vllm_omni_plugin.replicas.machines.other_machine import MachineSettings, OtherMachine

INTERVAL, TIMEOUT = "0.1", "1.0"


class Cable:
    """A namespace for another machine, joined with this one by a cable that can be cut.

    Attributes:
        address: of this end.
        prefix: of a command that runs at the other end.
    """

    def __init__(self) -> None:
        number = os.getpid()
        self._name, self._end = f"omni-machine-{number}", f"omni{number % 10**6}"
        network = f"10.204.{number % 250}"
        self.address, self.prefix = f"{network}.1", at(self._name)
        ip("netns", "add", self._name)
        ip("link", "add", self._end, "type", "veth", "peer", "name", "cable", "netns", self._name)
        ip("addr", "add", f"{self.address}/24", "dev", self._end)
        ip("link", "set", self._end, "up")
        ip("-n", self._name, "addr", "add", f"{network}.2/24", "dev", "cable")
        self.set("up")

    def set(self, state: str) -> None:
        ip("-n", self._name, "link", "set", "cable", state)

    def close(self) -> None:
        ip("link", "del", self._end)
        ip("netns", "del", self._name)


class OtherProcess:
    """Another machine. `lines` are what it has printed."""

    def __init__(self, rank: int, launcher: MachinesFakeLauncher, log: Path, *prefix: str) -> None:
        host, port = launcher.meeting_address
        program = (sys.executable, "-m", "tests.replicas.server.machines")
        self._log = log
        with log.open("a") as output:
            self.process = subprocess.Popen(
                [*prefix, *program, str(rank), f"tcp://{host}:{port}", INTERVAL, TIMEOUT], stdout=output
            )

    @property
    def lines(self) -> list[str]:
        return self._log.read_text().splitlines()

    def runs(self, meetings: int) -> bool:
        """Whether it takes part in the last of so many meetings, and has ended all others."""
        started = [line for line in self.lines if line.startswith("started")]
        return len(started) == meetings and self.lines[-1] == started[-1]


@pytest.fixture
def cable() -> Iterator[Cable]:
    cable = Cable()
    yield cable
    cable.close()


@pytest.fixture
def launcher(socket_folder: Path, keep: Keep) -> MachinesFakeLauncher:
    return keep(MachinesFakeLauncher(machines=2))


StartOther = Callable[..., OtherProcess]


@pytest.fixture
async def start_other(launcher: MachinesFakeLauncher, tmp_path: Path) -> AsyncIterator[StartOther]:
    others: list[OtherProcess] = []

    def start(*prefix: str) -> OtherProcess:
        others.append(OtherProcess(1, launcher, tmp_path / f"other-{len(others)}", *prefix))
        return others[-1]

    yield start
    for other in others:
        other.process.kill()
        other.process.wait()


async def served(start_node: StartNode, other: OtherProcess) -> Node:
    node = await start_node(heartbeat_interval=float(INTERVAL), heartbeat_timeout=float(TIMEOUT))
    await node.up()
    await eventually(lambda: other.runs(meetings=1), "its workers run")
    return node


async def ends(node: Node, caplog: pytest.LogCaptureFixture) -> None:
    """Return when the replica has ended because its machine is silent, and is about to wait for it."""
    await eventually(lambda: node.delays == [1.0], "the replica ends")
    assert "is out of service: its engine process 1000 exited: machine 1 at 10.0.0.1 has not answered" in caplog.text
    # The coordinator hears of it a moment later.
    await eventually(lambda: node.info is None, "it is listed no more")


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_machine_that_is_stopped_or_killed_ends_the_replica_until_it_is_back(
    start_node: StartNode, start_other: StartOther, caplog: pytest.LogCaptureFixture, fault: signal.Signals
) -> None:
    other = start_other()
    node = await served(start_node, other)
    before = await node.up()
    other.process.send_signal(fault)
    await ends(node, caplog)
    if fault == signal.SIGKILL:
        other, meetings = start_other(), 1
    else:
        other.process.send_signal(signal.SIGCONT)
        meetings = 2
    await node.up(after=before.incarnation)
    await eventually(lambda: other.runs(meetings), "its workers run")


@NEEDS_NAMESPACES
async def test_a_machine_that_is_cut_off_ends_the_replica_at_both_ends_until_it_is_back(
    start_node: StartNode,
    start_other: StartOther,
    launcher: MachinesFakeLauncher,
    cable: Cable,
    caplog: pytest.LogCaptureFixture,
) -> None:
    _, port = launcher.meeting_address
    launcher.meeting_address = cable.address, port
    other = start_other(*cable.prefix)
    node = await served(start_node, other)
    before = await node.up()
    cable.set("down")
    await ends(node, caplog)
    await eventually(lambda: other.lines[-1].startswith("ended"), "it ends its workers without a word of the first")
    cable.set("up")
    await node.up(after=before.incarnation)
    await eventually(lambda: other.runs(meetings=2), "its workers run again")


async def test_sigterm_drains_the_replica_before_its_machine_ends(
    start_node: StartNode, start_other: StartOther
) -> None:
    other = start_other()
    node = await served(start_node, other)
    async with node.attached() as head:
        other.process.send_signal(signal.SIGTERM)
        assert (await head.next_status()).status is ReplicaStatus.DRAINING
        assert other.runs(meetings=1)
        await head.detach()
    await asyncio.wait_for(node.running, 10)
    await eventually(lambda: other.process.poll() is not None, "it ends")
    assert (other.process.returncode, other.lines[-1][:5]) == (0, "ended")


async def test_a_machine_that_stood_still_reads_the_first_ones_answer_before_it_takes_that_for_silent() -> None:
    address, now, started = ("127.0.0.1", free_port()), [0.0], list[FakeWorkers]()
    settings = MachineSettings(1, "10.0.0.1", f"tcp://127.0.0.1:{address[1]}", {}, None, 0.05, 10.0)

    def start(plan: MeetingPlan) -> FakeWorkers:
        started.append(FakeWorkers(plan))
        return started[-1]

    def answers(report: MachineReport) -> list[MeetingPlan]:
        if len(reports) != 3:
            return [MeetingPlan(7)]
        # The answer is on its way.
        now[0] += 60.0
        return []

    with ThreadPoolExecutor(2) as executor:
        async with played_first_machine(address, answers) as reports:
            running = asyncio.create_task(OtherMachine(settings, start, executor, lambda: now[0]).run(60.0))
            await eventually(lambda: len(reports) > 5, "reports")
            running.cancel()
            await asyncio.wait([running])
    for workers in started:
        os.close(workers.sentinel)
    assert {(report.running, report.failed) for report in reports[2:]} == {(7, 0)}
