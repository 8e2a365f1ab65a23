"""Requests that need state that an earlier request of their key has left at its replica."""

from typing import Any

import pytest

from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.errors import RequestLostError
from vllm_omni_plugin.orchestrator.pool import affinity_bindings

KEY = 4


async def send_first(fleet: FakeFleet, key: int = KEY) -> Any:
    """The first request of a key begins; returns the id of its replica."""
    await fleet.submit(f"first of {key}", affinity=key)
    return fleet.home(f"first of {key}")


async def end_first(fleet: FakeFleet, key: int = KEY) -> None:
    fleet.say(f"first of {key}", finish_reason="stop")
    await fleet.read()


async def send_next(fleet: FakeFleet) -> None:
    """One that needs what the first one has left."""
    await fleet.submit("next", affinity=KEY, move="pinned")


async def is_lost(fleet: FakeFleet) -> bool:
    """Whether the request has ended with an error that says what to do, and is charged to nobody."""
    error = await fleet.the_error("next")
    assert isinstance(error, RequestLostError)
    return "Please send both again" in str(error) and sum(fleet.in_flight) == 0


async def test_it_ends_with_its_replica_and_is_sent_to_no_other(fleet: FakeFleet) -> None:
    replica_id = await send_first(fleet)
    await end_first(fleet)
    await send_next(fleet)
    assert fleet.home("next") == replica_id
    fleet.lose(replica_id)
    assert await is_lost(fleet)
    assert fleet.links[1 - replica_id].added == []
    assert fleet.orchestrator.metrics.requests_failed["replica_lost"] == 1


@pytest.mark.parametrize("back", [False, True])
async def test_it_ends_when_its_replica_was_lost_in_between_and_may_have_come_back(
    fleet: FakeFleet, back: bool
) -> None:
    replica_id = await send_first(fleet)
    await end_first(fleet)
    fleet.lose(replica_id)
    if back:
        fleet.join(fleet.pool.member(replica_id))
    added = [len(link.added) for link in fleet.links.values()]
    await send_next(fleet)
    assert await is_lost(fleet)
    assert [len(link.added) for link in fleet.links.values()] == added


@pytest.mark.parametrize("others_serve", [True, False])
async def test_it_follows_to_a_replica_that_gets_nothing_else_any_more(fleet: FakeFleet, others_serve: bool) -> None:
    replica_id = await send_first(fleet)
    await end_first(fleet)
    for cordoned in [replica_id] if others_serve else fleet.links:
        fleet.pool.cordon(fleet.pool.member(cordoned), "admin")
    await send_next(fleet)
    assert fleet.home("next") == replica_id


async def test_it_follows_to_where_the_first_one_has_moved(fleet: FakeFleet) -> None:
    replica_id = await send_first(fleet)
    fleet.lose(replica_id)
    fleet.join(fleet.pool.member(replica_id))
    moved_to = fleet.home(f"first of {KEY}")
    await end_first(fleet)
    fleet.join(fleet.pool.add())
    await send_next(fleet)
    assert fleet.home("next") == moved_to


async def test_the_latest_keys_are_remembered(fleet: FakeFleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity_bindings, "MAX_BINDINGS", 2)
    await send_first(fleet, KEY + 1)
    await end_first(fleet, KEY + 1)
    replica_id = await send_first(fleet)
    await end_first(fleet)
    fleet.join(fleet.pool.add())
    await send_next(fleet)
    assert fleet.home("next") == replica_id
    fleet.say("next", finish_reason="stop")
    await fleet.read()
    for key in (KEY + 1, KEY + 2):
        await send_first(fleet, key)
        await end_first(fleet, key)
    fleet.lose(replica_id)
    # As if it were the first one, but not twice.
    await send_next(fleet)
    assert fleet.home("next") != replica_id
    fleet.lose(fleet.home("next"))
    assert await is_lost(fleet)
