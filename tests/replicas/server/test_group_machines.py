"""A lockstep group over three machines with two ranks each: they start together, end together and meet again."""

import asyncio
import os
import random
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engines import FakeProcess
from tests.fakes.free_ports import free_port
from tests.replicas.remote_server import RemoteApi
from tests.replicas.server.conftest import FINGERPRINT
from tests.replicas.server.groups import MACHINES, RANKS, FakeRanksLauncher, Group, Machine
from tests.replicas.server.machines import played_first_machine
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.keep_running import Backoff
from vllm_omni_plugin.replicas.control.control_link import ControlClient, open_control_link
from vllm_omni_plugin.replicas.control.lease_messages import NO_MEETING, MachineReport, MeetingPlan
from vllm_omni_plugin.replicas.machines import other_machine
from vllm_omni_plugin.replicas.machines.group_machine import GroupMachine
from vllm_omni_plugin.replicas.machines.other_machine import MachineSettings, exit_of
from vllm_omni_plugin.replicas.replica_server.replica_server import ReplicaServer
from vllm_omni_plugin.replicas.replica_server.server_settings import ServerSettings


@pytest.fixture
async def empty() -> AsyncIterator[Group]:
    group = Group()
    yield group
    await group.close()


@pytest.fixture
async def group(empty: Group) -> Group:
    """It has met."""
    for rank in range(MACHINES):
        empty.start(rank)
    await empty.met()
    return empty


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
async def test_the_ranks_start_when_all_machines_are_there_in_any_order(empty: Group, order: Sequence[int]) -> None:
    for rank in order[:-1]:
        empty.start(rank)
    empty.start(order[-1])
    assert await empty.met() == 1
    assert {tuple(machine.launcher.met[-1][1]) for machine in empty.machines.values()} == {("in 1", "out 1")}
    assert all(len(machine.launcher.engines) == RANKS for machine in empty.machines.values())


async def test_a_meeting_waits_for_every_rank_of_a_machine(
    empty: Group, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_omni_plugin.replicas.machines.meeting_host.REMIND_AFTER_S", 0.01)
    caplog.set_level("INFO")
    machines = [empty.start(0), empty.start(1, late=1), empty.start(2)]
    await eventually(lambda: "machine 1 at 10.0.0.1, whose ranks do not start yet" in caplog.text)
    assert machines[0].launcher.coordinations == []
    machines[1].start_rank()
    assert await empty.met() == 1


@pytest.mark.parametrize("rank", range(MACHINES))
async def test_a_rank_that_ends_ends_all_and_all_meet_again(group: Group, rank: int) -> None:
    before = [process for machine in group.machines.values() for process in machine.alive]
    dying = group.machines[rank].alive[0]
    dying.exit_note = "it was ended by SIGKILL"
    dying.die()
    assert await group.met(after=1) == 2
    assert all(process.ended for process in before)
    for other, machine in group.machines.items():
        if other != rank:
            assert f"machine {rank} at 10.0.0.{rank}: it was ended by SIGKILL" in machine.reasons


async def test_a_meeting_waits_for_the_end_of_the_one_before(group: Group) -> None:
    group.machines[2].launcher.slow_end.clear()
    group.machines[1].alive[0].die()
    await eventually(lambda: not group.machines[0].alive)
    assert len(group.machines[0].launcher.met) == 1
    group.machines[2].launcher.slow_end.set()
    assert await group.met(after=1) == 2


async def test_a_coordinator_that_ends_ends_the_ranks(group: Group) -> None:
    group.machines[0].launcher.coordinations[0].die()
    assert await group.met(after=1) == 2


async def test_a_coordinator_that_does_not_start_is_tried_again(
    empty: Group, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("vllm_omni_plugin.replicas.machines.group_leader.Backoff", partial(Backoff, 0.01))
    first = empty.start(0)
    first.launcher.not_coordinated = 2
    empty.start(1)
    empty.start(2)
    assert await empty.met() == 1
    assert first.launcher.not_coordinated == 0
    logged = [record.getMessage() for record in caplog.records if "meeting" in record.getMessage()]
    failed = "A meeting of the group failed, and is tried again in 0 s: vLLM's coordinator did not start"
    assert logged == [failed] * 2


@pytest.mark.parametrize("rank", range(MACHINES))
async def test_a_command_that_is_killed_and_started_again_meets_the_others(group: Group, rank: int) -> None:
    # The first machine waits for its port.
    await group.machines[rank].close()
    group.machines.pop(rank)
    group.start(rank)
    await group.met(after=0 if rank == 0 else 1)
    assert all(len(machine.launcher.met) == (1 if other == rank else 2) for other, machine in group.machines.items())


@pytest.mark.parametrize("rank", range(MACHINES))
async def test_a_machine_that_is_told_to_end_drains_all_and_no_rank_ends_before_all_have_finished(
    group: Group, rank: int
) -> None:
    lasts = (rank + 1) % MACHINES
    processes = [process for machine in group.machines.values() for process in machine.alive]
    group.machines[lasts].is_busy = True
    group.machines[rank].machine.leave()
    await eventually(lambda: all(machine.draining for other, machine in group.machines.items() if other != lasts))
    assert not any(process.ended for process in processes)
    group.machines[lasts].is_busy = False
    await eventually(lambda: all(process.ended for process in processes))
    assert not any(process.killed for process in processes)


@pytest.mark.parametrize("rank", range(MACHINES))
async def test_a_machine_that_is_told_to_end_between_meetings_ends_all(
    empty: Group, rank: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_omni_plugin.replicas.machines.meeting_host.REMIND_AFTER_S", 0.01)
    caplog.set_level("INFO")
    machines = [empty.start(0), empty.start(1), empty.start(2, late=1)]
    await eventually(lambda: "for machine 2 at 10.0.0.2, whose ranks do not start yet" in caplog.text)
    machines[rank].machine.leave()
    # Its servers, which have no request, end at once.
    machines[rank].kill()
    await eventually(lambda: all(machine.draining for machine in machines))


async def test_a_machine_that_is_told_to_end_before_it_is_connected_ends_all(
    empty: Group, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that waits before its next attempt; the others would wait for it for ever."""
    monkeypatch.setattr("vllm_omni_plugin.replicas.machines.meeting_host.REMIND_AFTER_S", 0.01)
    caplog.set_level("INFO")
    first = empty.start(0)
    await eventually(lambda: "for machine 1 (--node-rank 1), machine 2 (--node-rank 2)" in caplog.text)
    attempts: list[object] = []

    async def connect(*args: Any, **named: Any) -> ControlClient:
        attempts.append(args)
        if len(attempts) == 1:
            await asyncio.get_running_loop().create_future()
        return await open_control_link(*args, **named)

    monkeypatch.setattr(other_machine, "open_control_link", connect)
    second = empty.start(1)
    await eventually(lambda: attempts)
    second.machine.leave()
    second.kill()
    await eventually(lambda: first.draining)


async def test_ranks_that_take_longer_to_end_than_the_first_machine_are_not_killed(
    group: Group, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    slow, may_end = group.machines[2].alive[0], threading.Event()
    shut_down = slow.shutdown

    def shut_down_slowly(timeout: float | None = None) -> None:
        may_end.wait(30)
        shut_down(timeout)

    slow.shutdown = shut_down_slowly  # type: ignore[method-assign]
    group.machines[1].machine.leave()
    await eventually(lambda: not group.machines[0].alive)
    await group.machines.pop(0).close()
    await eventually(lambda: "the ranks here end by themselves" in caplog.text)
    may_end.set()
    await eventually(lambda: slow.ended)
    assert not slow.killed


async def test_a_first_start_that_fails_is_repeated_since_another_machine_may_be_the_cause(
    empty: Group, socket_folder: Path
) -> None:
    for rank in range(1, MACHINES):
        empty.start(rank)
    first = empty.start(0, late=1)
    # The rank that does not serve heads is started first.
    first.launcher.failing = RANKS
    delays: list[float] = []

    async def delay(seconds: float) -> None:
        delays.append(seconds)

    settings = ServerSettings(
        host="127.0.0.1",
        ports=None,
        coordinator_addr="tcp://127.0.0.1:1",
        stage_id=0,
        heartbeat_interval=0.05,
        heartbeat_timeout=10.0,
        drain_timeout=60.0,
        secrets=None,
        fingerprint=FINGERPRINT,
    )
    with ThreadPoolExecutor(2) as executor:
        server = ReplicaServer(settings, first.machine, 1, RemoteApi(), executor, delay=delay)
        serving = asyncio.create_task(server.run())
        await eventually(server.ready.is_set)
        assert delays == [1.0]
        # Ranks leave together, or with their meeting.
        await empty.machines.pop(0).close()
        serving.cancel()
        await asyncio.wait([serving])


class AtOnce(Executor):
    """Does work where it is submitted."""

    def submit(self, work: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(work(*args, **named))
        return future


@pytest.mark.parametrize("reason", ["stopped to wait for the others", "did not start: it was stopped"])
async def test_a_rank_that_stops_in_the_moment_in_which_its_meeting_begins_ends_that(
    caplog: pytest.LogCaptureFixture, reason: str
) -> None:
    loop, address = asyncio.get_running_loop(), ("127.0.0.1", free_port())
    settings = MachineSettings(1, "10.0.0.1", f"tcp://127.0.0.1:{address[1]}", {}, None, 0.05, 10.0)
    launcher = FakeRanksLauncher()
    launcher.slow_end.set()
    machine = GroupMachine(settings, launcher, AtOnce(), time.monotonic, lambda: None)

    def answers(report: MachineReport) -> list[MeetingPlan]:
        return [MeetingPlan(7) if report.ready or report.running else NO_MEETING]

    async def wait(rank: int) -> None:
        async with machine.turn(rank):
            await loop.create_future()

    def stop(*_: object) -> None:
        loop.call_soon(ranks[0].cancel) if "wait" in reason else loop.call_soon(loop.call_soon, ranks[0].cancel)

    launcher.meet_in = stop  # type: ignore[method-assign]
    async with played_first_machine(address, answers) as reports:
        ranks = [asyncio.create_task(wait(rank)) for rank in range(RANKS)]
        tasks = [asyncio.create_task(machine.run(60.0)), *ranks]
        await eventually(lambda: reports and reports[-1].failed == 7 and reports[-1].reason.endswith(reason))
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_wait_for_an_exit_that_is_cancelled_as_it_ends_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    process = FakeProcess(1)
    waiting = asyncio.create_task(exit_of(process))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_soon(waiting.cancel)
    process.die()
    await asyncio.wait([waiting])
    os.close(process.sentinel)
    assert waiting.cancelled()
    assert caplog.records == []


async def test_a_first_machine_that_cannot_listen_names_the_flags(empty: Group) -> None:
    first = empty.start(0)
    await eventually(lambda: not first.running.done())
    second = Machine(0, empty.port)
    try:
        with pytest.raises(
            ConfigError, match="argument --master-addr: the first machine, --node-rank 0, wa"
        ) as refused:
            await asyncio.wait_for(second.running, 10)
        assert "--omni-replica" not in str(refused.value)
    finally:
        await second.close()


@pytest.mark.parametrize("seed", range(10))
async def test_after_any_faults_all_machines_meet_again(group: Group, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(8):
        machine = group.machines[chance.randrange(MACHINES)]
        match chance.randrange(3):
            case 0 if machine.alive:
                chance.choice(machine.alive).die()
            case 1:
                group.machines[0].launcher.coordinations[-1].die()
            case _ if machine is not group.machines[0]:
                rank = chance.choice((1, 2))
                await group.machines[rank].close()
                group.machines.pop(rank)
                group.start(rank)
        if chance.random() < 0.5:
            await asyncio.sleep(chance.random() / 20)
    last = await group.met()
    met = [machine.launcher.met[-1] for machine in group.machines.values()]
    assert all(each == met[0] for each in met)
    assert last == len(group.machines[0].launcher.coordinations)
