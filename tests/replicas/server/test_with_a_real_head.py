"""The head's own side against the real replica server: what both promise each other holds."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeRequest
from tests.replicas.server.conftest import MakeHead, Node, StartNode
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.replicas.remote import AttachRefusedError

SECRET = Secrets(["a secret that both ends know"])


def added(node: Node) -> list[str]:
    """Engine-side ids of the requests that reached the engine."""
    return [msgspec.json.decode(frames[1])["request_id"] for frames in node.engine.frames if frames[0] == b"add"]


@pytest.mark.parametrize("secrets", [None, SECRET], ids=["open", "encrypted"])
async def test_requests_go_to_the_engine_and_outputs_come_back(
    start_node: StartNode, make_head: MakeHead, secrets: Secrets | None
) -> None:
    node = await start_node(secrets=secrets)
    head = make_head(secrets)
    async with head.attached(await node.up()) as replica:
        assert replica.ready_response == b'"ready"'
        replica.client.add_request(FakeRequest("a"), "a-1")
        await eventually(lambda: added(node) == ["a-1"])
        node.engine.say(0, "a-1", "a-1")
        await eventually(lambda: head.tokens == ["a-1", "a-1"])
        assert await replica.client.call("is_sleeping") is False


async def test_two_heads_get_their_own_outputs(start_node: StartNode, make_head: MakeHead) -> None:
    node = await start_node()
    one, two = make_head(), make_head()
    info = await node.up()
    async with one.attached(info), two.attached(info) as second:
        node.engine.say(0, "a-1")
        node.engine.say(1, "b-1")
        await eventually(lambda: one.tokens and two.tokens)
        assert (one.tokens, two.tokens) == (["a-1"], ["b-1"])
        assert await second.client.call("is_sleeping") is False


async def test_what_differs_is_said_with_both_values(start_node: StartNode, make_head: MakeHead) -> None:
    node = await start_node(secrets=SECRET)
    with pytest.raises(AttachRefusedError, match="dtype: head has bfloat16, replica float32") as refusal:
        async with make_head(SECRET, dtype="bfloat16").attached(await node.up()):
            pass
    assert refusal.value.lasting


async def test_a_killed_engine_is_a_loss_and_the_next_incarnation_can_be_attached_to(
    start_node: StartNode, make_head: MakeHead
) -> None:
    node = await start_node()
    head = make_head()
    info = await node.up()
    async with head.attached(info):
        node.engine.process.kill()
        await eventually(lambda: head.deaths)
    async with head.attached(await node.up(after=info.incarnation)) as replica:
        assert await replica.client.call("is_sleeping") is False


async def test_a_server_that_drains_says_so_and_ends_when_its_head_lets_go(
    start_node: StartNode, make_head: MakeHead
) -> None:
    node = await start_node()
    head = make_head()
    async with head.attached(await node.up()):
        node.server.drain()
        await eventually(lambda: ReplicaStatus.DRAINING in head.statuses)
        assert not node.running.done()
    await asyncio.wait_for(node.running, 10)


async def test_a_replica_that_is_told_to_leave_ends(start_node: StartNode, make_head: MakeHead) -> None:
    node = await start_node()
    async with make_head().attached(await node.up()) as replica:
        replica.leave()
    await asyncio.wait_for(node.running, 10)


async def test_a_server_that_ends_is_a_loss(start_node: StartNode, make_head: MakeHead) -> None:
    node = await start_node()
    head = make_head()
    async with head.attached(await node.up()):
        node.running.cancel()
        await eventually(lambda: head.deaths)
        await asyncio.wait([node.running])


async def test_two_hundred_attachments_leave_no_descriptors(start_node: StartNode, make_head: MakeHead) -> None:
    node = await start_node()
    head = make_head()
    info = await node.up()

    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async with head.attached(info):
        pass
    before = descriptors()
    for _ in range(200):
        async with head.attached(info):
            pass
    # The sockets of the last attachments are closed in the background.
    await eventually(lambda: descriptors() <= before + 3)
