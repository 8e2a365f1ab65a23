"""An idle orchestrator costs nothing."""

import asyncio
import selectors
import threading
from functools import partial
from pathlib import Path

from tests.fakes.engine_api import FakeEngineApi
from tests.fakes.engines import connect, receive
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer
from vllm_omni_plugin.orchestrator import FleetControl, Orchestrator, StagePool
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadRules
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.replicas.links.engine_client import EngineClient
from vllm_omni_plugin.replicas.links.link import IpcLink


class NotingSelector(selectors.DefaultSelector):
    """Notes until when the loop meant to sleep, each time that it went to sleep."""

    def __init__(self) -> None:
        super().__init__()
        self.timeouts: list[float | None] = []

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout != 0:
            self.timeouts.append(timeout)
        return super().select(timeout)


async def sleeps(selector: NotingSelector) -> list[float | None]:
    """Return how long the loop meant to sleep, each time, until another thread woke it after half a second."""
    woken = asyncio.Event()
    timer = threading.Timer(0.5, asyncio.get_running_loop().call_soon_threadsafe, (woken.set,))
    selector.timeouts.clear()
    timer.start()
    await woken.wait()
    timer.join()
    return list(selector.timeouts)


async def idle_with_two_replicas(selector: NotingSelector, folder: Path) -> list[float | None]:
    """Return how the loop sleeps while an orchestrator of two connected replicas has nothing to do."""
    pool = StagePool(0, LeastQueueLengthBalancer())
    orchestrator = Orchestrator([pool], [FakeEngineApi()], HeadRules(3), lambda: 0.0)
    clients, sockets = [], []
    for replica_id in range(2):
        member = pool.add(replica_id)
        link = IpcLink(f"ipc://{folder}/in-{replica_id}", f"ipc://{folder}/out-{replica_id}", b"engine")
        sockets += connect(link.input_addr, link.output_addr, b"engine")
        sockets[-2].send(b"ready")
        receive(link.input_socket)
        received = partial(orchestrator.outputs_received, member)
        client = EngineClient(link, FakeEngineApi(), replica_id, received, lambda reason: None)
        client.start()
        pool.serve(member, client, link.input_addr, link.output_addr)
        clients.append(client)
    running = asyncio.create_task(FleetControl(orchestrator, FleetCalls(orchestrator)).run())
    slept = await sleeps(selector)
    # Sockets that connect wake it a few times.
    for _ in range(10):
        if len(slept) > 1:
            slept = await sleeps(selector)
    orchestrator.close_queues()
    await running
    for client in clients:
        client.close()
    for socket in sockets:
        socket.close()
    return slept


def test_an_idle_orchestrator_never_wakes_its_loop(tmp_path: Path) -> None:
    selector = NotingSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        assert runner.run(idle_with_two_replicas(selector, tmp_path)) == [None]
