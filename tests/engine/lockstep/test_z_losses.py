"""The end of a group, by force and in order. Named to be the last of this folder: the group does not come back."""

import asyncio

import psutil
import pytest

from tests.engine.experts import RANKS

from .group import HeadlessGroup
from .heads import FrontEnd
from .requests import new_request

pytestmark = pytest.mark.asyncio(loop_scope="package")

COORDINATOR = "DPCoordinator"


def of_the_group(group: HeadlessGroup, *, coordinator: bool) -> int:
    """The coordinator, or one of the ranks."""
    pids = [pid for pid in group.alive() if (COORDINATOR in "".join(psutil.Process(pid).cmdline())) is coordinator]
    assert len(pids) == (1 if coordinator else RANKS)
    return pids[0]


@pytest.mark.long
@pytest.mark.parametrize("coordinator", [False, True], ids=["rank", "coordinator"])
async def test_when_a_process_is_killed_the_whole_group_starts_again(
    group: HeadlessGroup, heads: list[FrontEnd], coordinator: bool
) -> None:
    infos = await group.up()
    before = group.alive()
    heads[0].send(0, new_request(400))
    await heads[0].ask(1, new_request(1))
    psutil.Process(of_the_group(group, coordinator=coordinator)).kill()
    for head in heads:
        await head.all_lost()
    again = await group.up(after=max(info.incarnation for info in infos))
    assert len(group.alive()) == RANKS + 1
    assert not set(before) & set(group.alive())
    for head in heads:
        await head.attach(again, group.context)
    for rank in range(RANKS):
        assert len(await heads[0].ask(rank, new_request())) == 4


async def test_a_rank_that_leaves_computes_on_for_the_others(group: HeadlessGroup, heads: list[FrontEnd]) -> None:
    answer = heads[0].send(1, new_request(300))
    heads[1].detach()
    heads[0].ranks[0].close()
    for server in group.servers:
        server.drain()
    async with asyncio.timeout(30):
        assert len(await answer) == 300
        heads[0].detach()
        await asyncio.gather(*group.running)
    assert group.alive() == []
