"""Thousands of requests that are aborted at any moment leave no state on either side."""

import asyncio
import gc
import os
import random
import threading
from contextlib import AsyncExitStack

import pytest

from tests.fakes.conditions import eventually
from tests.sim.protocol.requests import request
from tests.sim.protocol.whole_heads import NewHead, WholeHead, open_site
from vllm_omni_plugin.replicas.replica_server.served_engine import HEAD_SLOTS

AT_ONCE = 40
HEADS = 3
ENDLESS = 90_000
"""Tokens that no engine produces before somebody tells it to stop."""
NEVER = 10**6


def held() -> dict[str, int]:
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        # Those that the loop lends to whoever blocks stay for the next one.
        "threads": sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate()),
        "tasks": len(asyncio.all_tasks()),
    }


async def no_more_is_held_than(before: dict[str, int]) -> None:
    # A simulated engine's sentinel goes with its process object.
    gc.collect()
    await eventually(lambda: all(number <= before[what] for what, number in held().items()), f"no more than {before}")


def drawn(draw: random.Random, count: int, prefix: str) -> dict[str, int]:
    """Requests, and after how many tokens each is aborted: 0 before the first, `NEVER` after its end."""
    return {f"{prefix}-{number}": draw.choice((0, 0, 1, 2, 5, NEVER)) for number in range(count)}


def submit(head: WholeHead, draw: random.Random, moments: dict[str, int]) -> None:
    for request_id, moment in moments.items():
        tokens = draw.choice((1, 4)) if moment == NEVER else ENDLESS
        head.submit(request(request_id, prompt=draw.choice((2, 40)), max_tokens=tokens))


async def abort_each_in_its_moment(head: WholeHead, moments: dict[str, int]) -> None:
    """Abort each request when it is due; finished requests are aborted too, as clients may do."""
    left = dict(moments)
    while True:
        due = [name for name, moment in left.items() if head.produced[name] >= moment or name in head.ended]
        if due:
            head.abort(*due)
        for name in due:
            del left[name]
        if not left:
            return
        await head.more()


async def one_lot(head: WholeHead, draw: random.Random, prefix: str) -> None:
    """Requests that are aborted at once, before they are sent, before the first token, and later."""
    moments = drawn(draw, AT_ONCE, prefix)
    how = draw.choice(("together", "held", "sent"))
    if how == "held":
        head.pool.cordon(head.member, "admin")
    submit(head, draw, moments)
    at_once = [name for name, moment in moments.items() if moment == 0]
    if how != "together":
        await eventually(lambda: head.orchestrator.request_states.keys() >= moments.keys(), "all have been taken")
    head.abort(*at_once)
    if how == "held":
        await eventually(lambda: head.orchestrator.request_states.keys().isdisjoint(at_once))
        head.orchestrator.uncordon(head.member, "admin")
    await abort_each_in_its_moment(head, {name: moment for name, moment in moments.items() if moment})
    assert set(head.ended.values()) <= {"length"}
    head.forget()


async def leave_in_the_middle(head: WholeHead, stack: AsyncExitStack, draw: random.Random, prefix: str) -> None:
    async with stack:
        submit(head, draw, drawn(draw, AT_ONCE, prefix))
        await head.more()


async def abort_many(new_head: NewHead, requests: int) -> None:
    """Run all requests through heads, one of which is replaced in every round; then check what is left."""
    draw = random.Random(11)
    async with AsyncExitStack() as stack:
        heads = [await stack.enter_async_context(new_head()) for _ in range(HEADS)]
        at_rest: dict[str, int] = {}
        for first in range(0, requests, (HEADS + 1) * AT_ONCE):
            own = AsyncExitStack()
            guest = await own.enter_async_context(new_head())
            lots = (one_lot(head, draw, f"{first}-{index}") for index, head in enumerate(heads))
            await asyncio.gather(*lots, leave_in_the_middle(guest, own, draw, f"{first}-guest"))
            if not at_rest:
                await settled(heads)
                at_rest = held()
        await settled(heads)
        await no_more_is_held_than(at_rest)
        await assert_the_engine_has_nothing(heads)
        await assert_every_slot_is_clean(new_head)


async def settled(heads: list[WholeHead]) -> None:
    """Wait until no head has requests in flight or counts those of other heads."""
    for head in heads:
        await settles(head)


async def settles(head: WholeHead) -> None:
    await eventually(lambda: not head.orchestrator.request_states, "no request is left")
    await eventually(lambda: head.member.in_flight == {}, "nothing is charged")
    await eventually(lambda: head.member.load.others == 0, "nothing is heard of others' work")
    assert head.member.load.requests == head.member.load.prefill_tokens == 0


async def assert_the_engine_has_nothing(heads: list[WholeHead]) -> None:
    assert heads[0].member.client is not None
    # It refuses while any block is in use. The aborts of others come by other connections and may yet be on the way.
    async with asyncio.timeout(10):
        while not await heads[0].member.client.call("reset_prefix_cache"):
            pass
    heads[0].submit(request("last", max_tokens=1))
    await eventually(lambda: heads[0].ended == {"last": "length"})
    statistics = heads[0].statistics
    assert (statistics.num_running_reqs, statistics.num_waiting_reqs) == (0, 0)


async def assert_every_slot_is_clean(new_head: NewHead) -> None:
    """Heads in all free slots get only the answers to their own requests."""
    async with AsyncExitStack() as stack:
        heads = [await stack.enter_async_context(new_head()) for _ in range(HEAD_SLOTS - HEADS)]
        for head in heads:
            head.submit(request("own", max_tokens=2))
        for head in heads:
            await gets_its_own(head)


async def gets_its_own(head: WholeHead) -> None:
    await eventually(lambda: head.ended == {"own": "length"})
    assert head.produced == {"own": 2}


@pytest.mark.parametrize("requests", [480, pytest.param(10_000, marks=pytest.mark.long)])
async def test_many_aborts_leave_no_state(requests: int) -> None:
    # What a process makes once is no leak.
    async with open_site() as new_head, new_head():
        pass
    gc.collect()
    before = held()
    async with open_site() as new_head:
        await abort_many(new_head, requests)
    await no_more_is_held_than(before)
