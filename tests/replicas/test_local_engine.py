"""An engine of the head itself: it must say that it is ready, and tells what it has cached as long as it lives."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeEngineApi
from tests.fakes.engines import FakeLauncher, Plan
from tests.fakes.keeping import Keep
from tests.replicas.cache_publisher import FakePublisher, Mirror, stored
from tests.replicas.server.engines import ServedFakeEngine, ServedFakeLauncher
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.engine import running_engine
from vllm_omni_plugin.replicas.engine.running_engine import Engine, start_local_engine
from vllm_omni_plugin.replicas.replica_server.served_engine import start_served_engine


@pytest.fixture
def launcher(keep: Keep) -> ServedFakeLauncher:
    return keep(ServedFakeLauncher())


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


async def start(launcher: ServedFakeLauncher, executor: ThreadPoolExecutor) -> Engine:
    return await start_local_engine(launcher, FakeEngineApi(), executor, 0, lambda _: None)


async def test_an_engine_that_is_not_ready_in_time_is_killed(
    launcher: ServedFakeLauncher, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ServedFakeEngine, "wait", lambda *_: None)
    launcher.ready_timeout = 0.0
    with pytest.raises(ReplicaError, match=r"no ready response on ipc://.* within 0 s; A_VARIABLE sets how long"):
        await start(launcher, executor)
    assert launcher.engines[0].process.killed


async def test_an_engine_that_did_not_start_is_freed_before_garbage_is_collected(
    keep: Keep, executor: ThreadPoolExecutor
) -> None:
    launcher = keep(FakeLauncher())
    launcher.plan(0, Plan(refuse="no such model"))
    gc.disable()
    try:
        with suppress(ReplicaError):
            await start_local_engine(launcher, FakeEngineApi(), executor, 0, lambda _: None)
        engine = launcher.engines.pop()
        engine.close()
        freed = weakref.ref(engine)
        # A reference to itself.
        del engine.process
        del engine
        await eventually(lambda: freed() is None)
    finally:
        gc.enable()


async def test_an_engine_of_a_node_is_freed_before_garbage_is_collected(
    launcher: ServedFakeLauncher, executor: ThreadPoolExecutor
) -> None:
    gc.disable()
    try:
        engine = await start_served_engine(launcher, FakeEngineApi(), executor, 0)
        launcher.engines[0].process.die()
        await engine.lost
        await engine.close(executor, 0.0)
        freed = weakref.ref(engine)
        del engine
        await eventually(lambda: freed() is None)
    finally:
        gc.enable()


async def test_an_engine_has_its_turn_until_it_is_ready(keep: Keep, executor: ThreadPoolExecutor) -> None:
    order: list[str] = []

    class TurnTaking(ServedFakeLauncher):
        @asynccontextmanager
        async def turn(self, replica_id: int) -> AsyncIterator[None]:
            order.append("begins")
            yield
            order.append(f"ends with {len(self.engines)} engine")

    replica = await start(keep(TurnTaking()), executor)
    assert order == ["begins", "ends with 1 engine"]
    await replica.close(executor, 0.0)


async def test_the_cache_of_a_local_engine_is_reported(
    launcher: ServedFakeLauncher, executor: ThreadPoolExecutor, tmp_path: Path
) -> None:
    publisher, mirror = FakePublisher(tmp_path), Mirror()
    launcher.ready = publisher.ready_response()
    publisher.publish(stored([1, 2, 3, 4], 1))
    replica = await start(launcher, executor)
    replica.subscribe_cache(mirror.apply)
    await eventually(lambda: len(mirror.keys) == 1 and mirror.complete)
    await replica.close(executor, 0.0)
    publisher.close()


@pytest.mark.parametrize(
    ("ended", "grace_s", "failed"),
    [
        ("it was ended by SIGSEGV", 60.0, True),
        ("it was ended by SIGKILL", 60.0, False),
        pytest.param("", 0.01, False, id="it does not exit"),
    ],
)
async def test_the_exit_status_of_an_engine_counts_that_closes_its_sockets_first(
    keep: Keep, executor: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, ended: str, grace_s: float, failed: bool
) -> None:
    """Otherwise it depended on whether the head sent something just then, and a deadly request got a third engine."""
    monkeypatch.setattr(running_engine, "EXIT_GRACE_S", grace_s)
    launcher = keep(FakeLauncher())
    replica = await start_local_engine(launcher, FakeEngineApi(), executor, 0, lambda _: None)
    [engine] = launcher.engines
    engine.disconnect()

    def can_send() -> bool:
        with suppress(ReplicaError):
            replica.client.abort_requests(["a"])
            return True
        return False

    await eventually(lambda: not can_send(), "the disconnect is seen")
    for _ in range(3):
        await asyncio.sleep(0)
    assert not can_send()
    if ended:
        assert not replica.lost.done()
        engine.exit_note = ended
        engine.die()
    reason = await asyncio.wait_for(replica.lost, 10)
    assert (reason.endswith(f": {ended}" if ended else "unreachable"), replica.client.engine_failed) == (True, failed)
    await replica.close(executor, 0.0)
