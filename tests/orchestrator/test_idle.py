"""An idle orchestrator costs nothing."""

import asyncio
import selectors
from functools import partial
from pathlib import Path

from tests.fakes.engine_api import FakeEngineApi
from tests.fakes.engines import connect
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.stage_pool import StagePool
from vllm_omni_plugin.replicas.link import IpcLink
from vllm_omni_plugin.replicas.stage_client import StageClient


class CountingSelector(selectors.DefaultSelector):
    """Counts how often the loop went to sleep."""

    sleeps = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.sleeps += 1
        return super().select(timeout)


async def sleeps_in_a_second(selector: CountingSelector) -> int:
    before = selector.sleeps
    await asyncio.sleep(1.0)
    return selector.sleeps - before


async def settle(selector: CountingSelector) -> None:
    """Return once the loop has slept through a tenth of a second: connecting sockets wake it a few times."""
    async with asyncio.timeout(10):
        while True:
            before = selector.sleeps
            await asyncio.sleep(0.1)
            if selector.sleeps - before <= 2:
                return


async def idle_with_two_replicas(selector: CountingSelector, folder: Path) -> tuple[int, int]:
    """Return the loop's iterations in a second with and without an orchestrator of two connected replicas."""
    pool = StagePool(0, LeastQueueLengthBalancer())
    orchestrator = Orchestrator([pool], FakeEngineApi(), 3, lambda: 0.0)
    clients, sockets = [], []
    for replica_id in range(2):
        member = pool.add(replica_id)
        link = IpcLink(f"ipc://{folder}/in-{replica_id}", f"ipc://{folder}/out-{replica_id}", b"engine")
        sockets += connect(link.input_addr, link.output_addr, b"engine")
        sockets[-2].send(b"ready")
        link.receive_ready(10)
        received = partial(orchestrator.outputs_received, member)
        client = StageClient(link, FakeEngineApi(), replica_id, received, lambda reason: None)
        client.start()
        pool.serve(member, client, link.input_addr, link.output_addr)
        clients.append(client)
    running = asyncio.create_task(orchestrator.run())
    await settle(selector)
    with_orchestrator = await sleeps_in_a_second(selector)
    orchestrator.close_queues()
    await running
    for client in clients:
        client.close()
    for socket in sockets:
        socket.close()
    return with_orchestrator, await sleeps_in_a_second(selector)


def test_an_idle_orchestrator_never_wakes_its_loop(tmp_path: Path) -> None:
    selector = CountingSelector()
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(selector)) as runner:
        with_orchestrator, without = runner.run(idle_with_two_replicas(selector, tmp_path))
    assert with_orchestrator == without
