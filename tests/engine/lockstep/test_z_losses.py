"""The end of a group, by force and in order. Named to be the last of this folder: the group does not come back."""

import asyncio

import psutil
import pytest

from tests.engine.experts import RANKS

from .group import HeadlessGroup
from .heads import FrontEnd

pytestmark = pytest.mark.asyncio(loop_scope="package")

COORDINATOR = "DPCoordinator"


@pytest.mark.long
async def test_when_its_coordinator_is_killed_the_whole_group_starts_again(
    group: HeadlessGroup, heads: list[FrontEnd]
) -> None:
    infos = await group.up()
    before = group.alive()
    heads[0].send(0, 400)
    await heads[0].ask(1, 1)
    (coordinator,) = (pid for pid in before if COORDINATOR in "".join(psutil.Process(pid).cmdline()))
    psutil.Process(coordinator).kill()
    for head in heads:
        await head.all_lost()
    again = await group.up(after=max(info.incarnation for info in infos))
    assert len(group.alive()) == RANKS + 1
    assert not set(before) & set(group.alive())
    for head in heads:
        await head.attach(again, group.context)
    for rank in range(RANKS):
        assert len(await heads[0].ask(rank)) == 4


async def test_a_rank_that_leaves_computes_on_for_the_others(group: HeadlessGroup, heads: list[FrontEnd]) -> None:
    answer = heads[0].send(1, 300)
    heads[1].detach()
    heads[0].ranks[0].close()
    for server in group.servers:
        server.drain()
    async with asyncio.timeout(30):
        assert len(await answer) == 300
        heads[0].detach()
        await asyncio.gather(*group.running)
    assert group.alive() == []
