"""What heads that come and go leave behind: nothing."""

import os
import threading
from pathlib import Path

from tests.fakes.conditions import eventually
from tests.replicas.server.conftest import Node
from vllm_omni_plugin.replicas.server.served_engine import HEAD_SLOTS


def held() -> tuple[int, int]:
    return len(os.listdir("/proc/self/fd")), threading.active_count()


async def come_and_go(node: Node) -> None:
    async with node.attached() as first, node.attached() as second:
        await first.detach()
        await second.detach()


async def test_many_heads_leave_no_threads_descriptors_or_ports(node: Node) -> None:
    await come_and_go(node)
    await node.up()
    await eventually(lambda: (HEAD_SLOTS, "is_sleeping") in node.engine.calls)
    before = held()
    for _ in range(20):
        await come_and_go(node)
    await eventually(
        lambda: all(now <= then for now, then in zip(held(), before, strict=True)),
        f"at most {before} descriptors and threads",
    )


async def test_a_server_that_has_ended_leaves_nothing(node: Node, socket_folder: Path) -> None:
    others = set(threading.enumerate())
    await come_and_go(node)
    node.server.drain()
    await node.running
    started = {thread.name for thread in set(threading.enumerate()) - others}
    assert {name for name in started if name.startswith("omni-")} == set()
    assert os.listdir(socket_folder) == []
