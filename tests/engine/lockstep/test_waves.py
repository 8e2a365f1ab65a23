"""Ranks of a lockstep group behind replica servers: vLLM's own engine cores and coordinator, and several front ends."""

import asyncio
import random

import pytest

from tests.engine.experts import RANKS

from .executor import STEP_S, indexes, steps
from .group import NUMBERS, HeadlessGroup
from .heads import FrontEnd, Waves

pytestmark = pytest.mark.asyncio(loop_scope="package")

SYNC_STEPS = 16
"""Steps between two of a group's agreements on whether anybody has work: vLLM's `--dp-sync-interval`."""
LONG = 400
"""Tokens of an answer that takes longer than a call."""
ENOUGH_S = 20.0


async def test_the_first_request_wakes_all_ranks_and_the_last_lets_all_rest(
    group: HeadlessGroup, heads: list[FrontEnd], waves: Waves
) -> None:
    assert indexes(group.steps_folder) == dict(enumerate(NUMBERS))
    before = waves.heard[-1].wave
    for wave, rank in enumerate((1, 0), start=before):
        made = steps(group.steps_folder)
        started = asyncio.create_task(waves.until(lambda said: said.running))
        ended = asyncio.create_task(waves.until(lambda said, wave=wave: said.wave > wave and not said.running))
        await heads[0].ask(rank)
        assert (await started).wave == wave
        assert (await ended).wave == wave + 1
        assert all(count - made[rank] >= SYNC_STEPS for rank, count in steps(group.steps_folder).items())
    made = steps(group.steps_folder)
    # Calls are heard without a step. Each takes its time, so that a step would show.
    for _ in range(20):
        assert await heads[0].call("is_sleeping") == [False] * RANKS
    assert steps(group.steps_folder) == made, "a group at rest makes none"


async def test_no_request_that_comes_at_the_end_of_a_wave_is_left_behind(
    group: HeadlessGroup, heads: list[FrontEnd]
) -> None:
    chance = random.Random(7)
    for turn in range(60):
        head, rank = heads[turn % 2], chance.randrange(RANKS)
        await head.ask(rank, 1 + chance.randrange(3))
        # From the middle of the steps after the last token to well behind the end of the wave.
        await asyncio.sleep(chance.random() * 1.5 * SYNC_STEPS * STEP_S)


async def test_a_paused_group_keeps_what_comes_and_goes_on_when_resumed(
    group: HeadlessGroup, heads: list[FrontEnd], waves: Waves
) -> None:
    for _ in range(2):
        await heads[0].call("pause_scheduler", "keep", False)
        assert await heads[1].call("is_scheduler_paused") == [True] * RANKS
        made = steps(group.steps_folder)
        waiting = [head.send(rank) for head in heads for rank in range(RANKS)]
        assert await heads[0].call("is_sleeping") == [True] * RANKS
        assert not any(answer.done() for answer in waiting)
        assert steps(group.steps_folder) == made
        running = asyncio.create_task(waves.until(lambda said: said.running))
        await heads[1].call("resume_scheduler")
        assert all(len(tokens) == 4 for tokens in await asyncio.gather(*waiting))
        await running
    await heads[0].ask(1)


async def test_streams_end_whole_when_one_rank_is_paused_and_resumed_later_than_the_other(
    heads: list[FrontEnd],
) -> None:
    first, second = (replica.client for replica in heads[0].ranks)
    streams = [head.send(rank, LONG) for head in heads for rank in range(RANKS)]
    pausing = asyncio.create_task(first.call("pause_scheduler", "keep", False))
    # The other rank goes on; the pause is whole when both are paused.
    assert len(await heads[0].ask(1)) == 4
    assert not pausing.done()
    await asyncio.wait_for(second.call("pause_scheduler", "keep", False), ENOUGH_S)
    await asyncio.wait_for(pausing, ENOUGH_S)
    assert await heads[1].call("is_scheduler_paused") == [True] * RANKS
    # Nobody steps before both are resumed.
    resuming = asyncio.create_task(first.call("resume_scheduler"))
    assert await asyncio.wait_for(second.call("is_scheduler_paused"), ENOUGH_S)
    assert not resuming.done()
    await asyncio.wait_for(second.call("resume_scheduler"), ENOUGH_S)
    await asyncio.wait_for(resuming, ENOUGH_S)
    async with asyncio.timeout(ENOUGH_S):
        assert [len(tokens) for tokens in await asyncio.gather(*streams)] == [LONG] * len(streams)


async def test_a_group_that_slept_answers(heads: list[FrontEnd]) -> None:
    await heads[0].call("sleep", 1, "abort")
    assert await heads[1].call("is_sleeping") == [True] * RANKS
    assert await heads[1].call("wake_up") == [True] * RANKS
    assert len(await heads[0].ask(1, 3)) == 3
