"""The policies that use queue lengths only, or nothing."""

import random
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_omni_plugin.balancing import LeastQueueLengthBalancer, RoundRobinBalancer
from vllm_omni_plugin.balancing.sampling import positions_to_compare

from .fakes import FakeReplica, with_queues

Pick = tuple[frozenset[str], str]
"""The live replicas and the picked one."""


def pick(balancer: RoundRobinBalancer, live: str) -> str:
    """Pick among replicas with single-letter names, in this order."""
    return live[balancer.select({}, [FakeReplica(name) for name in live])]


def picks(balancer: RoundRobinBalancer, *history: str) -> str:
    return "".join(pick(balancer, live) for live in history)


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        pytest.param(["abc"] * 7, "abcabca", id="unchanged"),
        pytest.param(["a"] * 3, "aaa", id="alone"),
        pytest.param(["abc", "cab", "bca", "cba"], "abca", id="reordered"),
        pytest.param(["abc", "abc", "abcd", "abcd", "abcd", "abcd", "abcd"], "abdcabd", id="joiner is next, then last"),
        pytest.param(["ab", "ab", "xaby", "xaby", "xaby", "xaby"], "abxyab", id="joiners in their order"),
        pytest.param(["abc", "bc", "bc", "bc"], "abcb", id="first leaves"),
        pytest.param(["abc", "ac", "ac", "ac"], "acac", id="next leaves"),
        pytest.param(["abc", "abc", "ac", "ac", "abc", "abc", "abc"], "abcabca", id="comes back when due"),
        pytest.param(["ab", "b", "ab", "ab"], "abab", id="comes back after the other's turn"),
        pytest.param(["abc", "bc", "abc", "abc", "abc"], "abcab", id="comes back early and waits"),
        pytest.param(["ab", "cd", "cd", "ab", "ab"], "acdba", id="everyone replaced and back"),
    ],
)
def test_turns(history: list[str], expected: str) -> None:
    assert picks(RoundRobinBalancer(), *history) == expected


@pytest.mark.parametrize(("start_index", "expected"), [(0, "abca"), (1, "bcab"), (2, "cabc"), (3, "abca")])
def test_start_index_is_the_first_pick(start_index: int, expected: str) -> None:
    assert picks(RoundRobinBalancer(start_index), *["abc"] * 4) == expected


def test_a_list_changed_in_place_is_noticed() -> None:
    balancer, replicas = RoundRobinBalancer(), with_queues(0, 0, 0)
    balancer.select({}, replicas)
    del replicas[1]
    assert [balancer.select({}, replicas) for _ in range(3)] == [1, 0, 1]


def test_replicas_that_share_an_address_in_different_stages_are_different() -> None:
    replicas = [FakeReplica("tcp://replica:1", stage_id=0), FakeReplica("tcp://replica:1", stage_id=1)]
    balancer = RoundRobinBalancer()
    assert [balancer.select({}, replicas) for _ in range(4)] == [0, 1, 0, 1]


@st.composite
def membership_histories(draw: st.DrawFn) -> list[str]:
    """Live replicas at each pick, with joins, departures and returns."""
    live = list(draw(st.permutations("abcde"))[: draw(st.integers(1, 5))])
    history: list[str] = []
    for name, picks_until_then in draw(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 4)), max_size=15)):
        history += ["".join(live)] * picks_until_then
        if name not in live:
            live.insert(draw(st.integers(0, len(live))), name)
        elif len(live) > 1:
            live.remove(name)
    return [*history, *["".join(live)] * draw(st.integers(0, 6))]


def assert_fair(record: list[Pick]) -> None:
    for start in range(len(record)):
        steady, counts = set(record[start][0]), Counter[str]()
        for live, picked in record[start:]:
            steady &= live
            counts[picked] += 1
            assert all(counts[picked] - counts[name] <= 1 for name in steady), record[start:]


@given(membership_histories(), st.integers(0, 7))
@example(["abc", "bc", "abc", "bc", "abc", "abc"], 0)
def test_turns_are_fair_over_any_membership_history(history: list[str], start_index: int) -> None:
    balancer = RoundRobinBalancer(start_index)
    assert_fair([(frozenset(live), pick(balancer, live)) for live in history])


@pytest.fixture
def eager_thread_switches() -> Iterator[None]:
    """Switch threads as often as possible."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_thread_switches")
def test_threads_share_the_turns_evenly() -> None:
    balancer, threads, turns = RoundRobinBalancer(), 4, 1000
    together = Barrier(threads)

    def pick_repeatedly() -> Counter[int]:
        # A separate list per thread, so that each pick updates the membership.
        replicas = with_queues(0, 0, 0, 0, 0)
        together.wait(timeout=30)
        return Counter(balancer.select({}, replicas) for _ in range(turns))

    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(pick_repeatedly) for _ in range(threads)]
        total = sum((future.result() for future in futures), Counter[int]())
    assert total == dict.fromkeys(range(5), threads * turns // 5)


def test_a_decision_counts_as_a_turn_when_it_is_dispatched() -> None:
    balancer, replicas = RoundRobinBalancer(), with_queues(0, 0, 0)
    first = balancer.decide({}, replicas)
    assert [balancer.decide({}, replicas) for _ in range(3)] == [first] * 3
    assert (first.position, first.reason) == (0, "turn")
    balancer.assigned({}, replicas[0], first)
    assert balancer.decide({}, replicas).position == 1


@pytest.mark.parametrize("queue_lengths", [[-1], [0, -2, -1, 5]])
def test_a_negative_length_is_a_value_error(queue_lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"^queue_length must be non-negative$"):
        LeastQueueLengthBalancer().select({}, with_queues(*queue_lengths))


@pytest.mark.parametrize(("total", "found"), [(9, 1.0), (256, 1.0), (1024, 0.25)])
def test_scores_are_compared_with_that_of_a_shortest_queue_of_up_to_256(total: int, found: float) -> None:
    rng, short = random.Random(1), total - 3
    replicas = with_queues(*(0 if position == short else 5 for position in range(total)))
    times = sum(short in positions_to_compare(replicas, rng) for _ in range(400))
    assert times / 400 == pytest.approx(found, abs=0.06)


def test_a_decision_of_a_large_fleet_lists_the_chosen_replica_only() -> None:
    decision = LeastQueueLengthBalancer().decide({}, with_queues(*[5] * 8, 3, *[4] * 8))
    assert [(candidate.position, candidate.score) for candidate in decision.candidates] == [(8, 3.0)]
