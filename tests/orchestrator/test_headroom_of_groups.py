"""Of each eight replicas one is left without prompts of requests that leave room for others."""

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


async def test_of_eight_replicas_one_is_left_without_prompts_for_those_that_others_leave_room_for() -> None:
    balancer = Preferring()
    async with FakeFleet(8, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        sent = await prompts_everywhere(fleet, balancer, begun=8)
        assert sent == [*["ab"] * 7, "a"]


async def test_in_a_smaller_fleet_no_replica_is_left_without_prompts_as_more_of_it_would_idle() -> None:
    balancer = Preferring()
    async with FakeFleet(7, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        assert await prompts_everywhere(fleet, balancer, begun=7) == ["ab"] * 7


async def test_the_last_replica_without_prompts_gets_its_own_once_another_one_has_none() -> None:
    balancer = Preferring()
    async with FakeFleet(8, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        await prompts_everywhere(fleet, balancer, begun=8)
        fleet.say("a7", 2)
        assert got(fleet.links[7]) == "a"
        fleet.say("b3", 1)
        fleet.say("a7", 3)
        assert got(fleet.links[7]) == "ab"


async def test_a_replica_whose_slots_are_taken_is_no_other_one_without_prompts() -> None:
    balancer = Preferring()
    async with FakeFleet(8, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        await prompts_everywhere(fleet, balancer, begun=8)
        fleet.say("b3", 1, running=SLOTS)
        fleet.say("a7", 2)
        assert got(fleet.links[7]) == "a"


async def test_after_a_second_the_last_replica_without_prompts_gets_its_own_although_no_other_is_without_one() -> None:
    balancer = Preferring()
    async with FakeFleet(8, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        await prompts_everywhere(fleet, balancer, begun=8)
        fleet.now += 0.99
        fleet.say("a7", 2)
        assert got(fleet.links[7]) == "a"
        fleet.now += 0.01
        fleet.say("a7", 3)
        assert got(fleet.links[7]) == "ab"


async def test_a_replica_with_sessions_alone_gets_prompts_since_nothing_may_be_heard_of_it() -> None:
    balancer = Preferring()
    async with FakeFleet(8, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        balancer.position = 7
        await fleet.submit("s", prompt=[1], resumable=True, terms=CALM)
        fleet.say("s", 1, finish_reason="stop")
        assert (await prompts_everywhere(fleet, balancer, begun=7))[7] == "s0b"


@pytest.mark.parametrize("replicas", [16, 23])
async def test_in_a_larger_fleet_one_replica_of_each_eight_or_more_is_left_without_prompts(replicas: int) -> None:
    balancer = Preferring()
    async with FakeFleet(replicas, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        sent = await prompts_everywhere(fleet, balancer, begun=replicas)
        half = (replicas + 1) // 2
        assert sent == [*["ab"] * (half - 1), "a", *["ab"] * (replicas - half - 1), "a"]


async def test_an_engine_that_idles_gets_a_prompt_although_no_other_replica_is_without_one() -> None:
    balancer = Preferring()
    async with FakeFleet(8, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        assert (await prompts_everywhere(fleet, balancer, begun=7))[7] == "b"


async def test_who_need_not_leave_room_gets_the_replica_that_was_left_without_prompts() -> None:
    balancer = Preferring()
    async with FakeFleet(8, balancer, send_window=ROOMY, plan=EQUALS) as fleet:
        await prompts_everywhere(fleet, balancer, begun=8)
        balancer.position = 0
        await fleet.submit("1", prompt=[1, 2], terms=CALM)
        assert fleet.attempt("1")[0] is fleet.links[7]
