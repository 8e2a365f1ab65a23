"""One replica of each group of eight or more is kept free of prefills of over-share requests."""

import pytest

from tests.fakes.fleet import FakeFleet

from .late_fleet import CALM, EQUALS, FLOOD, ROOMY, SLOTS, Preferring, answer_first, got


async def prompts_everywhere(fleet: FakeFleet, balancer: Preferring, begun: int) -> list[str]:
    """So many replicas answer a request of the flooding tenant, and each is to get one more of its prompts. Returns
    what was sent to each of the replicas."""
    await answer_first(fleet, "0", CALM)
    count = len(fleet.links)
    for balancer.position in range(begun):
        await fleet.submit(f"a{balancer.position}", prompt=[1, 2], terms=FLOOD)
        fleet.say(f"a{balancer.position}", 1)
    for balancer.position in range(count):
        await fleet.submit(f"b{balancer.position}", prompt=[1, 2], terms=FLOOD)
    return [got(link).removeprefix("0") for link in fleet.links.values()]


async def test_one_of_eight_replicas_is_kept_free_of_over_share_prefills() -> None:
    balancer = Preferring()
    async with FakeFleet(8, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        sent = await prompts_everywhere(fleet, balancer, begun=8)
        assert sent == [*["ab"] * 7, "a"]


async def test_a_smaller_fleet_keeps_no_replica_free() -> None:
    balancer = Preferring()
    async with FakeFleet(7, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        assert await prompts_everywhere(fleet, balancer, begun=7) == ["ab"] * 7


async def test_a_free_replica_gets_its_prefill_once_another_one_is_free() -> None:
    balancer = Preferring()
    async with FakeFleet(8, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        await prompts_everywhere(fleet, balancer, begun=8)
        fleet.say("a7", 2)
        assert got(fleet.links[7]) == "a"
        fleet.say("b3", 1)
        fleet.say("a7", 3)
        assert got(fleet.links[7]) == "ab"


async def test_a_replica_without_a_free_slot_does_not_count_as_free() -> None:
    balancer = Preferring()
    async with FakeFleet(8, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        await prompts_everywhere(fleet, balancer, begun=8)
        fleet.say("b3", 1, running=SLOTS)
        fleet.say("a7", 2)
        assert got(fleet.links[7]) == "a"


async def test_a_replica_is_kept_free_for_a_second_at_most() -> None:
    balancer = Preferring()
    async with FakeFleet(8, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        await prompts_everywhere(fleet, balancer, begun=8)
        fleet.now += 0.99
        fleet.say("a7", 2)
        assert got(fleet.links[7]) == "a"
        fleet.now += 0.01
        fleet.say("a7", 3)
        assert got(fleet.links[7]) == "ab"


async def test_a_replica_with_sessions_only_gets_prefills_since_it_may_send_no_output() -> None:
    balancer = Preferring()
    async with FakeFleet(8, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        balancer.position = 7
        await fleet.submit("s", prompt=[1], resumable=True, terms=CALM)
        fleet.say("s", 1, finish_reason="stop")
        assert (await prompts_everywhere(fleet, balancer, begun=7))[7] == "s0b"


@pytest.mark.parametrize("replicas", [16, 23])
async def test_a_larger_fleet_keeps_one_replica_of_each_group_free(replicas: int) -> None:
    balancer = Preferring()
    async with FakeFleet(replicas, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        sent = await prompts_everywhere(fleet, balancer, begun=replicas)
        half = (replicas + 1) // 2
        assert sent == [*["ab"] * (half - 1), "a", *["ab"] * (replicas - half - 1), "a"]


async def test_an_idle_engine_gets_a_prefill_although_no_other_replica_is_free() -> None:
    balancer = Preferring()
    async with FakeFleet(8, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        assert (await prompts_everywhere(fleet, balancer, begun=7))[7] == "b"


async def test_a_request_within_its_share_gets_the_free_replica() -> None:
    balancer = Preferring()
    async with FakeFleet(8, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        await prompts_everywhere(fleet, balancer, begun=8)
        balancer.position = 0
        await fleet.submit("1", prompt=[1, 2], terms=CALM)
        assert fleet.attempt("1")[0] is fleet.links[7]
