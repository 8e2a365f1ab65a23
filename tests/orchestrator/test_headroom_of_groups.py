"""One replica of each group is kept free of prefills of over-share requests, in small fleets with large headroom."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admission import AdmissionConfig

from .late_fleet import CALM, EQUALS, FLOOD, LARGE_HEADROOM, LATE, ROOMY, SLOTS, Preferring, answer_first, got


def sent(fleet: FakeFleet) -> list[str]:
    return [got(link).removeprefix("0") for link in fleet.links.values()]


@asynccontextmanager
async def flooded(
    replicas: int = 8,
    decoding: int = 8,
    session_at: int | None = None,
    policy_chooses: int = 7,
    plan: AdmissionConfig = EQUALS,
) -> AsyncIterator[FakeFleet]:
    """The first replicas decode an over-share request `a`, then each replica is to get a further one, `b`."""
    balancer = Preferring()
    async with FakeFleet(replicas, balancer, send_window=LATE, size=ROOMY, plan=plan) as fleet:
        if session_at is not None:
            balancer.position = session_at
            await fleet.submit("s", prompt=[1], resumable=True, terms=CALM)
            fleet.say("s", 1, finish_reason="stop")
        await answer_first(fleet, "0", CALM)
        for balancer.position in range(decoding):
            await fleet.submit(f"a{balancer.position}", prompt=[1, 2], terms=FLOOD)
            fleet.say(f"a{balancer.position}", 1)
        for balancer.position in range(replicas):
            await fleet.submit(f"b{balancer.position}", prompt=[1, 2], terms=FLOOD)
        balancer.position = policy_chooses
        yield fleet


@pytest.mark.parametrize(
    ("replicas", "decoding", "expected"),
    [
        pytest.param(8, 8, [*["ab"] * 7, "a"], id="one of eight"),
        pytest.param(7, 7, ["ab"] * 7, id="none in a smaller fleet"),
        pytest.param(8, 7, [*["ab"] * 7, "b"], id="no idle replica"),
        pytest.param(16, 16, [*["ab"] * 7, "a"] * 2, id="one of each eight"),
        pytest.param(23, 23, [*["ab"] * 11, "a", *["ab"] * 10, "a"], id="one of each eight to fifteen"),
    ],
)
async def test_one_replica_of_each_group_is_kept_free(replicas: int, decoding: int, expected: list[str]) -> None:
    async with flooded(replicas, decoding) as fleet:
        assert sent(fleet) == expected


@pytest.mark.parametrize(
    ("replicas", "decoding", "expected"),
    [
        pytest.param(1, 1, ["ab"], id="not the only one"),
        pytest.param(2, 2, ["ab", "a"], id="one of two"),
        pytest.param(7, 7, [*["ab"] * 6, "a"], id="one of seven"),
        pytest.param(3, 2, ["ab", "ab", "b"], id="no idle replica"),
        pytest.param(16, 16, [*["ab"] * 7, "a"] * 2, id="one of each eight"),
    ],
)
async def test_with_large_headroom_a_small_fleet_is_a_group(replicas: int, decoding: int, expected: list[str]) -> None:
    async with flooded(replicas, decoding, plan=LARGE_HEADROOM) as fleet:
        assert sent(fleet) == expected


async def test_a_small_fleet_gets_a_prefill_free_replica_by_reload_and_loses_it_by_another_one() -> None:
    async with flooded(3, 3) as fleet:
        admission = fleet.orchestrator.admission
        assert admission is not None
        admission.replace(LARGE_HEADROOM)
        fleet.say("b2", 1)
        await fleet.submit("c2", prompt=[1, 2], terms=FLOOD)
        assert sent(fleet) == ["ab", "ab", "ab"]
        admission.replace(EQUALS)
        fleet.say("a2", 2)
        assert sent(fleet) == ["ab", "ab", "abc"]


@pytest.mark.parametrize("replicas", [1, 2, 3])
async def test_with_large_headroom_all_requests_of_a_flood_are_sent_although_no_time_passes(replicas: int) -> None:
    async with flooded(replicas, replicas, plan=LARGE_HEADROOM) as fleet:
        for number in range(20):
            await fleet.submit(f"c{number}", prompt=[1, 2], terms=FLOOD)
        open_requests = fleet.orchestrator.request_states
        while open_requests:
            before = len(open_requests)
            for link in fleet.links.values():
                for attempt in [*link.added]:
                    if any(attempt in member.in_flight for member in fleet.pool.members):
                        link.output(attempt, 1, finish_reason="stop", running=0)
            assert len(open_requests) < before


async def test_a_free_replica_gets_its_prefill_once_another_one_is_free() -> None:
    async with flooded() as fleet:
        fleet.say("a7", 2)
        assert sent(fleet)[7] == "a"
        fleet.say("b3", 1)
        fleet.say("a7", 3)
        assert sent(fleet)[7] == "ab"


async def test_a_replica_without_a_free_slot_does_not_count_as_free() -> None:
    async with flooded() as fleet:
        fleet.say("b3", 1, running=SLOTS)
        fleet.say("a7", 2)
        assert sent(fleet)[7] == "a"


@pytest.mark.parametrize(("replicas", "plan"), [(8, EQUALS), (3, LARGE_HEADROOM)])
async def test_a_replica_is_kept_free_for_a_second_at_most(replicas: int, plan: AdmissionConfig) -> None:
    async with flooded(replicas, replicas, plan=plan) as fleet:
        fleet.now += 0.99
        fleet.say(f"a{replicas - 1}", 2)
        assert sent(fleet)[-1] == "a"
        fleet.now += 0.01
        fleet.say(f"a{replicas - 1}", 3)
        assert sent(fleet)[-1] == "ab"


async def test_a_replica_with_sessions_only_gets_prefills_since_it_may_send_no_output() -> None:
    async with flooded(decoding=7, session_at=7) as fleet:
        assert sent(fleet)[7] == "s0b"


@pytest.mark.parametrize(("replicas", "plan"), [(8, EQUALS), (3, LARGE_HEADROOM)])
async def test_a_request_within_its_share_gets_the_free_replica(replicas: int, plan: AdmissionConfig) -> None:
    async with flooded(replicas, replicas, policy_chooses=0, plan=plan) as fleet:
        await fleet.submit("1", prompt=[1, 2], terms=CALM)
        assert fleet.attempt("1")[0] is fleet.links[replicas - 1]
