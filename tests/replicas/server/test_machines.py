"""A replica over three machines: they meet, serve, end together and meet again."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
from msgspec import structs

from tests.fakes.conditions import eventually
from tests.fakes.keeping import Keep
from tests.replicas.server.conftest import FINGERPRINT, Node, StartNode
from tests.replicas.server.machines import LAYOUT, FakeWorkers, MachinesFakeLauncher, played_first_machine
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.replicas.control.control_link import ControlClient, open_control_link
from vllm_omni_plugin.replicas.control.lease_messages import (
    NO_MEETING,
    FromServer,
    MachineReport,
    MeetingPlan,
)
from vllm_omni_plugin.replicas.machines import other_machine
from vllm_omni_plugin.replicas.machines.meetings import setup_of
from vllm_omni_plugin.replicas.machines.other_machine import MachineSettings, OtherMachine

SECRETS = Secrets(["a secret that both ends know"])


class Machine:
    """Another machine. `workers` are those of all its meetings."""

    def __init__(self, rank: int, launcher: MachinesFakeLauncher, first_timeout: float = 60.0, **other: object) -> None:
        self.workers: list[FakeWorkers] = []
        host, port = launcher.meeting_address
        settings = MachineSettings(
            rank, f"10.0.0.{rank}", f"tcp://{host}:{port}", setup_of(FINGERPRINT, LAYOUT), None, 0.05, 10.0
        )
        self._executor = ThreadPoolExecutor(2)
        self.machine = OtherMachine(
            replace(settings, **other),  # type: ignore[arg-type]
            self._start,
            self._executor,
            time.monotonic,
        )
        self.running = asyncio.create_task(self.machine.run(first_timeout))

    def _start(self, plan: MeetingPlan) -> FakeWorkers:
        self.workers.append(FakeWorkers(plan))
        return self.workers[-1]

    async def close(self) -> None:
        for workers in self.workers:
            workers.may_end.set()
        self.running.cancel()
        with suppress(asyncio.CancelledError, OmniError):
            await self.running
        self._executor.shutdown()
        while self.workers:
            os.close(self.workers.pop().sentinel)


StartMachine = Callable[..., Machine]


class PlayedMachine:
    """Another machine that reports only when the test says so."""

    def __init__(self, rank: int, link: ControlClient, answers: "asyncio.Queue[FromServer]") -> None:
        self._rank = rank
        self._link = link
        self._answers = answers

    async def report(self, **fields: Any) -> MeetingPlan:
        """Report once; the answer."""
        report = MachineReport(self._rank, 1, f"10.0.0.{self._rank}", setup_of(FINGERPRINT, LAYOUT))
        self._link.send(structs.replace(report, **fields))
        return await self.answer()

    async def report_until_met(self) -> None:
        while not (await self.report()).meeting:
            pass

    async def answer(self) -> MeetingPlan:
        """The next message of the first machine."""
        answer = await asyncio.wait_for(self._answers.get(), 10)
        assert isinstance(answer, MeetingPlan)
        return answer


@asynccontextmanager
async def played_machine(launcher: MachinesFakeLauncher, rank: int) -> AsyncIterator[PlayedMachine]:
    host, port = launcher.meeting_address
    answers: asyncio.Queue[FromServer] = asyncio.Queue()
    with zmq.Context[zmq.Socket[bytes]]() as context:
        link = await open_control_link(context, f"tcp://{host}:{port}", None, answers.put_nowait, lambda: None)
        with closing(link):
            yield PlayedMachine(rank, link, answers)


@pytest.fixture
def launcher(socket_folder: Path, keep: Keep) -> MachinesFakeLauncher:
    return keep(MachinesFakeLauncher())


@pytest.fixture
async def start_machine(launcher: MachinesFakeLauncher) -> AsyncIterator[StartMachine]:
    machines: list[Machine] = []

    def start(rank: int, **other: object) -> Machine:
        machines.append(Machine(rank, launcher, **other))
        return machines[-1]

    yield start
    for machine in machines:
        await machine.close()


@pytest.fixture
async def others(start_machine: StartMachine, node: Node) -> list[Machine]:
    """The replica serves."""
    others = [start_machine(1), start_machine(2)]
    await node.up()
    await plans(others, meetings=1)
    return others


async def plans(machines: list[Machine], meetings: int) -> list[list[MeetingPlan]]:
    """Of the meetings of each machine, once workers have been started in so many; fake engines do not wait for them."""
    await eventually(lambda: all(len(machine.workers) == meetings for machine in machines), f"{meetings} meetings")
    return [[workers.plan for workers in machine.workers] for machine in machines]


async def test_the_engine_starts_when_all_machines_are_there_in_any_order(
    start_node: StartNode, start_machine: StartMachine, launcher: MachinesFakeLauncher
) -> None:
    node = await start_node()
    async with played_machine(launcher, 2) as second:
        assert (await second.report()).meeting == 0
        assert (launcher.engines, node.info) == ([], None)
        others = [start_machine(1)]
        await node.up()
        ((plan,),) = await plans(others, meetings=1)
        assert plan == await second.answer()
    assert ([plan.port], plan.number, plan.incarnation) == (launcher.ports, 5, 0)
    async with node.attached() as head:
        assert head.attached.machines == ["127.0.0.1", "10.0.0.1", "10.0.0.2"]


async def test_workers_that_end_end_the_replica_and_all_meet_again(
    node: Node, others: list[Machine], launcher: MachinesFakeLauncher
) -> None:
    before = await node.up()
    async with node.attached() as head:
        # One machine takes long to end what it has of the old meeting.
        others[1].workers[0].may_end.clear()
        others[0].workers[0].die("its worker VllmWorker-1 was ended by SIGKILL")
        status = await head.next_status()
        assert status.status is ReplicaStatus.ERROR
        assert "machine 1 at 10.0.0.1: its worker VllmWorker-1 was ended by SIGKILL" in status.reason
        assert not status.engine_failed
    await eventually(lambda: node.delays == [1.0])
    assert len(launcher.engines) == 1, "a meeting with a half of an old one"
    others[1].workers[0].may_end.set()
    await node.up(after=before.incarnation)
    (old, new), same = await plans(others, meetings=2)
    assert [old, new] == same
    assert old.meeting != new.meeting
    assert (old.incarnation, new.incarnation) == (0, 1)
    assert all(machine.workers[0].ended and not machine.workers[1].ended for machine in others)


async def test_an_engine_that_ends_ends_the_workers_of_all_machines(node: Node, others: list[Machine]) -> None:
    before = await node.up()
    node.engine.process.die()
    await node.up(after=before.incarnation)
    await plans(others, meetings=2)
    assert [[workers.ended for workers in machine.workers] for machine in others] == 2 * [[True, False]]


@pytest.mark.parametrize(
    ("interval", "late"), [(0.2, 0.4), pytest.param(5.0, 2, id="reports are missed before such an engine ends")]
)
async def test_an_engine_that_reports_an_error_of_its_own_has_a_lost_machine_as_the_cause(
    start_node: StartNode, start_machine: StartMachine, launcher: MachinesFakeLauncher, interval: float, late: float
) -> None:
    node = await start_node(heartbeat_interval=interval)
    async with played_machine(launcher, 1) as silent:
        await silent.report()
        # After the one that is silent, as the first that is late is named.
        start_machine(2)
        await silent.report_until_met()
        async with node.attached() as head:
            node.late = late
            node.engine.report_death()
            status = await head.next_status()
    assert f"the engine reported its own death: machine 1 at 10.0.0.1 has not answered for {late} s" in status.reason
    assert not status.engine_failed


async def test_a_machine_that_is_silent_ends_the_replica(
    start_node: StartNode, start_machine: StartMachine, launcher: MachinesFakeLauncher
) -> None:
    node = await start_node(heartbeat_timeout=1.0)
    other = start_machine(1)
    async with played_machine(launcher, 2) as silent:
        await silent.report_until_met()
        await eventually(lambda: launcher.engines and launcher.engines[0].process.killed)
    await eventually(lambda: other.workers[0].ended)
    await eventually(lambda: node.delays == [1.0])


async def test_an_engine_that_cannot_be_killed_is_killed_again_and_the_others_end_their_workers(
    node: Node, others: list[Machine], launcher: MachinesFakeLauncher, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await node.up()
    process, failures = launcher.engines[0], [RuntimeError("can't start new thread")]
    kill = process.kill

    def kill_at_the_second_try() -> None:
        if failures:
            raise failures.pop()
        kill()

    monkeypatch.setattr(process, "kill", kill_at_the_second_try)
    others[0].workers[0].die("it was ended by SIGKILL")
    await node.up(after=before.incarnation)
    await plans(others, meetings=2)
    # It still looks for silent machines.
    await others[1].close()
    await eventually(lambda: launcher.engines[1].process.killed)


async def test_workers_that_cannot_be_ended_are_ended_before_the_next_meeting(
    node: Node, others: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = await node.up()
    workers, failures = others[0].workers[0], [OSError("Too many open files")]
    end = workers.end

    def end_at_the_second_try() -> None:
        if failures:
            raise failures.pop()
        end()

    monkeypatch.setattr(workers, "end", end_at_the_second_try)
    others[1].workers[0].die("it was ended by SIGKILL")
    await node.up(after=before.incarnation)
    assert workers.ended


async def test_a_first_start_that_another_machine_makes_fail_is_repeated(
    start_node: StartNode, start_machine: StartMachine, launcher: MachinesFakeLauncher
) -> None:
    launcher.loads_for_ever = True
    node = await start_node()
    others = [start_machine(1), start_machine(2)]
    await plans(others, meetings=1)
    await eventually(lambda: launcher.engines)
    launcher.loads_for_ever = False
    others[0].workers[0].die("it has no memory")
    await node.up()
    assert node.delays == [1.0]


async def test_the_others_end_their_workers_without_the_first_machine_and_wait_for_it(
    start_node: StartNode, node: Node, others: list[Machine]
) -> None:
    node.running.cancel()
    await asyncio.wait([node.running])
    await eventually(lambda: all(machine.workers[0].ended for machine in others))
    again = await start_node()
    await again.up()
    (old, new), same = await plans(others, meetings=2)
    assert [old, new] == same
    assert old.meeting != new.meeting


async def test_a_machine_that_loses_the_connection_has_left_the_meeting(
    node: Node, start_machine: StartMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks: list[Callable[[], None]] = []

    async def connect(*arguments: Any, **named: Any) -> ControlClient:
        breaks.append(arguments[4])
        return await open_control_link(*arguments, **named)

    monkeypatch.setattr(other_machine, "open_control_link", connect)
    others = [start_machine(1), start_machine(2)]
    before = await node.up()
    await plans(others, meetings=1)
    async with node.attached() as head:
        # The first machine does not notice it.
        breaks[0]()
        status = await head.next_status()
    assert "it has lost the first machine: the connection to it is lost" in status.reason
    assert not status.engine_failed
    await node.up(after=before.incarnation)
    (old, new), same = await plans(others, meetings=2)
    assert [old, new] == same
    assert old.meeting != new.meeting


async def test_a_machine_that_is_told_to_end_drains_the_replica_first(node: Node, others: list[Machine]) -> None:
    async with node.attached() as head:
        others[0].machine.leave()
        assert (await head.next_status()).status is ReplicaStatus.DRAINING
        assert not others[0].workers[0].ended
        await head.detach()
    await asyncio.wait_for(node.running, 10)
    await asyncio.wait_for(others[0].running, 10)
    assert others[0].workers[0].ended
    assert not others[1].running.done(), "it waits for the next meeting"


async def test_a_meeting_that_ends_as_it_begins_leaves_a_machine_ready_for_the_next(
    launcher: MachinesFakeLauncher, start_machine: StartMachine
) -> None:
    first, second = iter([(MeetingPlan(7), NO_MEETING)]), MeetingPlan(8)

    def answers(report: MachineReport) -> Iterable[MeetingPlan]:
        return next(first, () if report.running else (second,))

    async with played_first_machine(launcher.meeting_address, answers):
        other = start_machine(1)
        await eventually(lambda: other.workers and other.workers[-1].plan == second, "the second meeting")


async def test_a_machine_without_a_meeting_leaves_at_once(start_machine: StartMachine) -> None:
    machine = start_machine(1)
    machine.machine.leave()
    await asyncio.wait_for(machine.running, 10)


async def test_a_machine_that_leaves_as_a_meeting_begins_starts_no_workers(
    launcher: MachinesFakeLauncher, start_machine: StartMachine
) -> None:
    answers = iter([(NO_MEETING,), (NO_MEETING,), (MeetingPlan(7), MeetingPlan(7, drain=True))])
    async with played_first_machine(launcher.meeting_address, lambda report: next(answers)) as reports:
        other = start_machine(1, interval=10.0)
        await eventually(lambda: reports)
        other.machine.leave()
        await asyncio.wait_for(other.running, 10)
    assert [report.leaving for report in reports] == [False, True, True]
    assert "omni-workers" not in {task.get_name() for task in asyncio.all_tasks()}


@pytest.mark.parametrize(
    ("secrets", "first"),
    [
        pytest.param(SECRETS, "24", id="with a secret"),
        pytest.param(None, "another value", id="any peer may send a report, and must not learn what runs here"),
    ],
)
async def test_a_machine_with_another_layout_ends_with_the_reason(
    start_node: StartNode, start_machine: StartMachine, secrets: Secrets | None, first: str
) -> None:
    await start_node(secrets=secrets)
    other = start_machine(1, setup=setup_of(FINGERPRINT, {"--tensor-parallel-size": "8"}), secrets=secrets)
    refusal = f"refuses this one: --tensor-parallel-size is 8, and on the first machine {first}$"
    with pytest.raises(OmniError, match=refusal):
        await asyncio.wait_for(other.running, 10)


async def test_a_machine_that_is_refused_does_not_drain_the_replica_when_it_ends(
    node: Node, others: list[Machine], launcher: MachinesFakeLauncher
) -> None:
    async with played_machine(launcher, 1) as another:
        answer = await another.report(setup={"model": "another"}, leaving=True)
    assert "model" in answer.refusal
    async with node.attached():
        assert not node.running.done(), "a draining replica refuses heads"


async def test_a_machine_with_another_secret_ends_with_the_flags_to_check(
    start_node: StartNode, start_machine: StartMachine, caplog: pytest.LogCaptureFixture
) -> None:
    ours, other = (Secrets([word * 16]) for word in ("a", "b"))
    await start_node(secrets=ours)
    machine = start_machine(1, first_timeout=0.05, secrets=other)
    with pytest.raises(OmniError, match="check --master-addr, --master-port and --omni-secret-file"):
        await asyncio.wait_for(machine.running, 10)
    assert "refused secret" in caplog.text


async def test_a_machine_that_reaches_nobody_ends_with_the_flags_to_check(start_machine: StartMachine) -> None:
    machine = start_machine(1, first_timeout=0.05, timeout=0.1)
    with pytest.raises(OmniError, match="check --master-addr, --master-port and --omni-secret-file"):
        await asyncio.wait_for(machine.running, 10)
