"""The replicas of this node: those that die, or do not start beside others, come back."""

import asyncio
import gc
import logging
import os
import threading
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from tests.fakes.adapter_files import write_adapter
from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeEngineApi, FakeOutput, FakeOutputs, FakeRequest
from tests.fakes.engines import READY, UNPROBED, FakeEngine, FakeLauncher, GroupLauncher, Plan
from tests.orchestrator.local_node import EACH_START_FAILURE, Node, answer, received, running_node
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.coordinator.protocol.fleet_state import ReplicaState, StageState
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.orchestrator.pool import stage_calls
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import CallReplicas, RequestFailed
from vllm_omni_plugin.replicas.engine.running_engine import Engine
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter, adapter_digest, adapter_mismatch
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize

UP, DOWN = ReplicaStatus.UP, ReplicaStatus.DOWN


@pytest.fixture
async def node(request: pytest.FixtureRequest) -> AsyncIterator[Node]:
    others = engine_threads()
    async with running_node(getattr(request, "param", FakeLauncher)) as node:
        yield node
    await eventually(lambda: engine_threads() <= others, "the end of all threads")


def engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("omni-engine")}


@EACH_START_FAILURE
async def test_a_replica_that_does_not_start_is_tried_again_beside_one_that_serves(
    node: Node, plan: Plan, error: type[Exception], text: str
) -> None:
    gate = threading.Event()
    node.launcher.plan(0, plan)
    node.launcher.plan(1, Plan(spawn_gate=gate))
    starting = asyncio.create_task(node.replicas.start())
    await eventually(lambda: node.pauses == [1.0])
    assert not starting.done(), "the other one still starts, and nothing serves"
    gate.set()
    assert await starting == [[READY]]
    assert node.statuses == [DOWN, UP]
    assert text in node.orchestrator.events.after()[0].reason
    node.go_on.release()
    await node.until_back(0, restarts=1)
    assert not node.pool.member(0).starts_with_head, "the server has taken its length from the other one"


async def test_the_start_fails_if_the_last_replica_does_not_start_while_another_is_tried_again(node: Node) -> None:
    gate = threading.Event()
    node.launcher.plan(0, Plan(refuse="no such model"))
    node.launcher.plan(1, Plan(spawn_gate=gate, refuse="no such device"))
    starting = asyncio.create_task(node.replicas.start())
    await eventually(lambda: node.pauses == [1.0])
    gate.set()
    with pytest.raises(ReplicaError, match="no such device"):
        await starting
    await node.replicas.close(0.0)
    assert sorted(node.launcher.starts) == [0, 1]


async def test_an_engine_whose_model_lacks_the_stages_task_does_not_start(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeEngineApi, "pooling_task", "classify")
    starting = asyncio.create_task(node.replicas.start())
    await eventually(lambda: len(node.launcher.engines) == 2)
    for engine in node.launcher.engines:
        await answer(engine, "get_supported_tasks", ["embed", "token_embed"])
    with pytest.raises(ReplicaError, match=r"its model cannot 'classify': .* with one of embed, token_embed"):
        await starting
    assert node.pool.serving == ()


async def test_closing_while_an_engine_is_being_spawned_leaves_none(node: Node) -> None:
    gate = threading.Event()
    node.launcher.plan(0, Plan(spawn_gate=gate))
    starting = asyncio.create_task(node.replicas.start())
    await node.until_statuses(DOWN, UP)
    starting.cancel()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    await node.replicas.close(0.0)
    assert len(node.launcher.engines) == 2
    assert all(engine.process.ended for engine in node.launcher.engines)


async def test_a_replica_that_dies_is_lost_at_once_and_comes_back_after_the_pause(node: Node) -> None:
    await node.replicas.start()
    dead = node.engine_of(0)
    dead.process.die()
    await node.until_statuses(DOWN, UP)
    await eventually(lambda: node.pauses == [1.0])
    assert sorted(node.launcher.starts) == [0, 1]
    node.go_on.release()
    await node.until_statuses(UP, UP)
    assert node.pool.member(0).restarts == 1
    assert node.engine_of(0) is not dead
    kinds = [event.kind.value for event in node.orchestrator.events.after() if event.replica == "0.0"]
    assert kinds == ["attach", "lost", "restart", "attach"]


async def test_an_engine_that_fails_while_it_enters_service_leaves_it_again(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    await node.replicas.start()
    serves = node.orchestrator.replica_serves

    def fail_once(*args: Any) -> None:
        serves(*args)
        monkeypatch.undo()
        raise OSError("too many open files")

    monkeypatch.setattr(node.orchestrator, "replica_serves", fail_once)
    node.engine_of(0).process.die()
    node.go_on.release()
    await eventually(lambda: len(node.pauses) == 2)
    assert node.statuses == [DOWN, UP]
    node.go_on.release()
    await node.until_back(0, restarts=2)


async def test_outputs_from_before_the_death_of_an_engine_are_delivered(node: Node) -> None:
    await node.replicas.start()
    node.submit(FakeRequest("a"))
    await eventually(lambda: node.orchestrator.request_states)
    state = node.orchestrator.request_states["a"].runs[0]
    assert state.replica_id is not None
    engine = node.engine_of(state.replica_id)
    engine.say(msgspec.json.encode(FakeOutputs(outputs=[FakeOutput(state.engine_request_id, [1], "stop")])))
    [outputs] = await node.orchestrator.front_end.output_async_queue.get_batch()
    engine.process.die()
    items = await node.orchestrator.front_end.output_async_queue.get_batch()
    assert outputs.outputs[0].finish_reason == "stop"
    assert [item for item in items if isinstance(item, RequestFailed)] == []


async def test_a_restart_that_takes_too_long_is_tried_again_and_the_log_names_the_setting(
    node: Node, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await node.replicas.start()
    node.launcher.ready_timeout = 0.0
    with monkeypatch.context() as slow:
        slow.setattr(FakeEngine, "wait", lambda *_: None)
        node.engine_of(0).process.die()
        node.go_on.release()
        await eventually(lambda: node.pauses == [1.0, 2.0])
    assert "no ready response on" in caplog.records[-1].getMessage()
    assert node.launcher.ready_timeout_variable in caplog.records[-1].getMessage()
    assert node.launcher.engines[-1].process.killed
    node.launcher.ready_timeout = 10.0
    node.go_on.release()
    await node.until_back(0, restarts=2)


async def test_a_restarted_replica_is_brought_up_to_date(node: Node) -> None:
    await node.replicas.start()
    node.engine_of(0).process.die()
    await node.until_statuses(DOWN, UP)
    reply: Future[list[object]] = Future()
    node.orchestrator.rpc_async_queue.put(CallReplicas("set_weight_version", ("v2",), reply))
    await answer(node.engine_of(1), "set_weight_version")
    await asyncio.wrap_future(reply)
    node.go_on.release()
    await eventually(lambda: len(node.launcher.engines) == 3)
    await answer(node.launcher.engines[2], "set_weight_version")
    await node.until_statuses(UP, UP)


async def test_a_replica_waits_for_the_files_of_an_adapter_and_is_not_started_again_and_again(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[threading.Thread] = []

    def read(adapter: Adapter) -> str:
        readers.append(threading.current_thread())
        return adapter_mismatch(adapter)

    monkeypatch.setattr(stage_calls, "adapter_mismatch", read)
    await node.replicas.start()
    folder = tmp_path / "story"
    write_adapter(folder, b"weights")
    story = Adapter("story", 7, str(folder), digest=adapter_digest(str(folder)))
    reply: Future[list[object]] = Future()
    node.orchestrator.rpc_async_queue.put(CallReplicas("add_lora", (story,), reply))
    for engine in node.launcher.engines:
        await answer(engine, "add_lora", True)
    await asyncio.wrap_future(reply)
    folder.rename(tmp_path / "elsewhere")
    node.engine_of(0).process.die()
    node.go_on.release()
    await eventually(lambda: node.pauses == [1.0, 5.0])
    node.go_on.release()
    await eventually(lambda: node.pauses == [1.0, 5.0, 5.0])
    assert len(node.launcher.engines) == 3
    [refused] = [event for event in node.orchestrator.events.after() if event.kind == "refuse"]
    assert (refused.replica, str(folder) in refused.reason) == ("0.0", True)
    (tmp_path / "elsewhere").rename(folder)
    node.go_on.release()
    await answer(node.launcher.engines[2], "add_lora", True)
    await node.until_statuses(UP, UP)
    assert len(node.launcher.engines) == 3
    assert threading.current_thread() not in readers, "the files may be on a file system that hangs"


async def test_a_replica_that_waits_for_an_adapter_and_dies_is_started_again(node: Node, tmp_path: Path) -> None:
    await node.replicas.start()
    missing = Adapter("story", 7, str(tmp_path / "story"), digest="of files that were there")
    reached = [member.engine_key for member in node.pool.members]
    node.orchestrator.stage_calls[0].adopt(ReplicaState(1, "", StageState((missing,))), reached)
    node.engine_of(0).process.die()
    node.go_on.release()
    await eventually(lambda: node.pauses == [1.0, 5.0])
    node.launcher.engines[2].process.die()
    await eventually(lambda: node.pauses[2:])
    node.go_on.release()
    await eventually(lambda: len(node.launcher.engines) == 4)


async def test_a_restarted_replica_with_memory_for_a_shorter_length_than_all_had_at_the_start_does_not_serve(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    """The server takes the shortest length of the engines that it starts with."""
    for replica_id, tokens in ((0, 4096), (1, 2048)):
        node.launcher.plan(replica_id, fits(tokens))
    await node.replicas.start()
    node.launcher.plan(0, fits(1024))
    node.engine_of(0).process.die()
    node.go_on.release()
    await eventually(lambda: "a max model length of 1024 tokens" in caplog.text)
    assert "and this head has promised its clients 2048" in caplog.text
    node.launcher.plan(0, fits(2048))
    node.go_on.release()
    await node.until_statuses(UP, UP)


def fits(tokens: int) -> Plan:
    return Plan(ready_response=msgspec.json.encode(EngineSize(max_model_len=tokens)))


async def test_engines_are_not_restarted_after_disable_restarts(node: Node) -> None:
    await node.replicas.start()
    node.engine_of(0).process.die()
    await eventually(lambda: node.pauses == [1.0])
    node.replicas.disable_restarts()
    node.engine_of(1).process.die()
    node.go_on.release()
    await eventually(lambda: not any(task.get_name().startswith("omni-replica-") for task in asyncio.all_tasks()))
    assert (node.pauses, sorted(node.launcher.starts)) == ([1.0], [0, 1])


async def test_many_lives_leave_no_descriptor_open() -> None:
    # The first socket opens what the ZMQ context keeps for good.
    zmq.Context.instance().socket(zmq.PULL).close()
    others, before = engine_threads(), descriptors()
    for _ in range(3):
        node = Node()
        await node.replicas.start()
        node.engine_of(0).process.die()
        node.go_on.release()
        await node.until_back(0, restarts=1)
        await node.close()
    await eventually(lambda: engine_threads() <= others and descriptors() <= before, "the count of before")


@pytest.mark.parametrize("fault", ["it is idle", "it is probed", "its successor fails, too"])
async def test_an_engine_that_has_died_is_freed_before_garbage_is_collected(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has four descriptors of its process, and a large head collects its oldest garbage rarely."""

    def fail_once(*_: Any) -> None:
        monkeypatch.undo()
        raise OSError("too many open files")

    gc.collect()
    gc.disable()
    try:
        before = engines()
        node = Node(heartbeats=(0.001, UNPROBED[1])) if fault == "it is probed" else Node()
        await node.replicas.start()
        if fault == "it is probed":
            assert (await received(node.engine_of(0)))[1][1] == "is_sleeping"
        if fault == "its successor fails, too":
            monkeypatch.setattr(node.orchestrator, "replica_serves", fail_once)
        node.engine_of(0).process.die()
        node.go_on.release()
        node.go_on.release()
        await eventually(lambda: node.pauses and node.statuses == [UP, UP], "the next one that serves")
        await eventually(lambda: engines() == before + 2, "the freeing of those before")
    finally:
        gc.enable()
    await node.close()


def engines() -> int:
    return sum(type(each) is Engine for each in gc.get_objects())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_a_replica_that_is_removed_ends_and_does_not_come_back(
    node: Node, caplog: pytest.LogCaptureFixture
) -> None:
    await node.replicas.start()
    first, second = node.pool.members
    engine = node.engine_of(0)
    node.pool.cordon(second, "admin")
    node.submit(FakeRequest("a"))
    await eventually(lambda: first.queue_length == 1, "the request")
    node.orchestrator.uncordon(second, "admin")
    node.replicas.leave(first)
    assert (first.queue_length, second.queue_length) == (0, 1)
    assert node.pool.members == (second,)
    await eventually(lambda: engine.process.ended, "the end of its engine")
    assert node.pauses == []
    # The operator wanted it.
    assert [record.getMessage() for record in caplog.records if record.levelno > logging.INFO] == []


@pytest.mark.parametrize("node", [GroupLauncher], indirect=True)
async def test_a_rank_that_is_removed_takes_its_group_with_it(node: Node) -> None:
    await node.replicas.start()
    engines = [node.engine_of(rank) for rank in range(2)]
    node.replicas.leave(node.pool.member(1))
    assert node.pool.members == ()
    await eventually(lambda: all(engine.process.ended for engine in engines), "the end of both engines")
    assert node.pauses == []


async def test_a_replica_that_ends_for_good_before_the_others_are_ready_ends_the_start(node: Node) -> None:
    node.launcher.plan(1, Plan(ready=False))
    starting = asyncio.create_task(node.replicas.start())
    await node.until_statuses(UP, DOWN)
    node.replicas.disable_restarts()
    node.engine_of(0).process.die()
    with pytest.raises(ReplicaError, match="it ended before all others were ready"):
        await starting
