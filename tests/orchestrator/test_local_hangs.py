"""A replica of this node whose engine hangs: its requests move, nothing is killed, and it is taken back."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import Future

import msgspec
import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeOutput, FakeOutputs, FakeRequest, FakeUtilityOutput
from tests.fakes.engines import FakeEngine, FakeLauncher
from tests.fakes.told_probe import ToldProbe, told_probes
from tests.orchestrator.local_node import Node, answer, received, running_node
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import CallReplicas

UP, DOWN, ERROR = ReplicaStatus.UP, ReplicaStatus.DOWN, ReplicaStatus.ERROR


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[ToldProbe]:
    """By replica, once these have started."""
    return told_probes(monkeypatch)


@pytest.fixture
async def node(probes: list[ToldProbe]) -> AsyncIterator[Node]:
    async with running_node() as node:
        await node.replicas.start()
        clients = [member.client for member in node.pool.members]
        probes.sort(key=lambda probe: clients.index(probe.engine.client))
        yield node


async def bring_up_to_date(engine: FakeEngine) -> None:
    """The engine answers the calls that bring it up to date."""
    assert await answer(engine, "abort_requests") == [None]
    await answer(engine, "is_sleeping", False)


async def test_an_engine_that_answers_again_is_reset_brought_up_to_date_and_serves(
    node: Node, probes: list[ToldProbe]
) -> None:
    engine = node.engine_of(0)
    probes[0].hangs()
    reply: Future[list[object]] = Future()
    node.orchestrator.rpc_async_queue.put(CallReplicas("set_weight_version", ("v2",), reply))
    await answer(node.engine_of(1), "set_weight_version")
    await asyncio.wrap_future(reply)
    probes[0].answers()
    await bring_up_to_date(engine)
    assert await answer(engine, "set_weight_version") == ["v2"]
    await node.until_statuses(UP, UP)
    assert len(node.launcher.engines) == 2
    node.submit(FakeRequest("a"))
    node.submit(FakeRequest("b"))
    assert {(await received(each))[0] for each in node.launcher.engines} == {"add"}


@pytest.mark.parametrize("missed", [False, True])
async def test_an_engine_that_hangs_keeps_updated_weights_and_waits_if_it_missed_an_update(
    node: Node, probes: list[ToldProbe], missed: bool
) -> None:
    engine, probe = node.engine_of(0), probes[0]
    for hangs in (False, missed):
        if hangs:
            probe.hangs()
        reply: Future[list[object]] = Future()
        update = ("reload_weights", None, [], {"weights_path": "/step"})
        node.orchestrator.rpc_async_queue.put(CallReplicas("collective_rpc", update, reply))
        for called in node.launcher.engines:
            if not hangs or called is not engine:
                await answer(called, "collective_rpc")
        await asyncio.wrap_future(reply)
    if not missed:
        probe.hangs()
    probe.answers()
    await bring_up_to_date(engine)
    await node.until_statuses(ReplicaStatus.DRAINING if missed else UP, UP)
    assert len(node.launcher.engines) == 2


async def test_a_call_fails_on_an_engine_that_hangs_and_returns_the_other_answers(
    node: Node, probes: list[ToldProbe]
) -> None:
    reply: Future[list[object]] = Future()
    node.orchestrator.rpc_async_queue.put(CallReplicas("set_weight_version", ("v2",), reply))
    await received(node.engine_of(0))
    await answer(node.engine_of(1), "set_weight_version", "taken")
    probes[0].hangs()
    assert await asyncio.wrap_future(reply) == ["taken"]
    assert node.pauses == []


async def test_late_outputs_of_moved_requests_are_dropped(node: Node, probes: list[ToldProbe]) -> None:
    second = node.pool.member(1)
    node.pool.cordon(second, "admin")
    node.submit(FakeRequest("a"))
    engine = node.engine_of(0)
    _, body = await received(engine)
    node.orchestrator.uncordon(second, "admin")
    probes[0].hangs()
    late = FakeOutputs(outputs=[FakeOutput(body["request_id"], [1])], scheduler_stats=7)
    engine.say(msgspec.json.encode(late))
    probes[0].answers()
    await bring_up_to_date(engine)
    await node.until_statuses(UP, UP)
    assert [item.scheduler_stats for item in await node.orchestrator.front_end.output_async_queue.get_batch()] == [0]
    assert list(node.orchestrator.request_states["a"].runs[0].produced) == []


async def test_an_engine_that_cannot_be_reset_is_started_afresh(node: Node, probes: list[ToldProbe]) -> None:
    engine, probe = node.engine_of(0), probes[0]
    probe.hangs()
    probe.answers()
    _, (call_id, _, _) = await received(engine)
    engine.say(msgspec.json.encode(FakeOutputs(utility_output=FakeUtilityOutput(call_id, "out of order"))))
    await eventually(lambda: engine.process.ended)
    node.go_on.release()
    await node.until_back(0, restarts=1)


async def test_a_replica_that_is_removed_while_it_is_taken_back_does_not_serve(
    node: Node, probes: list[ToldProbe]
) -> None:
    first, second = node.pool.members
    engine, preparing, prepared = node.engine_of(0), asyncio.Event(), asyncio.Event()

    async def prepare(*_: object, **__: object) -> None:
        preparing.set()
        await prepared.wait()

    node.orchestrator.prepare_replica = prepare  # type: ignore[method-assign]
    probes[0].hangs()
    probes[0].answers()
    await bring_up_to_date(engine)
    await preparing.wait()
    serving: list[int] = []
    serving_signal = node.orchestrator.serving_signal
    serving_signal.notify = lambda: serving.append(len(node.pool.serving))  # type: ignore[method-assign]
    prepared.set()
    node.replicas.leave(first)
    await eventually(lambda: engine.process.ended)
    assert (serving, node.pool.members) == ([], (second,))


async def test_an_engine_that_does_not_answer_is_taken_out_until_it_answers() -> None:
    async with running_node(FakeLauncher, (1,), None, (0.01, 0.1)) as node:
        await node.replicas.start()
        (engine,), (member,) = node.launcher.engines, node.pool.members
        # Asserted by the status alone: from here on it may hang again at any moment, as it answers nothing by itself.
        await eventually(lambda: member.status is ERROR)
        back: list[ReplicaStatus] = []
        serving_signal = node.orchestrator.serving_signal
        serving_signal.notify = lambda: back.append(member.status)  # type: ignore[method-assign]
        await answer(engine, "is_sleeping", False)
        await bring_up_to_date(engine)
        await eventually(lambda: back)
        assert not engine.process.ended
