"""The cost-aware policy, by hand-computed cases. A prompt token takes 1 s, a token of the answer 10 s."""

import random

import pytest

from vllm_omni_plugin.balancing import CostAwareBalancer, Prompt, ReplicaLoad, Task

from .fakes import FakeReplica, with_loads, with_queues


def task(request_id: str = "a", prompt: int = 100, max_tokens: int = 5) -> Task:
    return {"request_id": request_id, "prompt": Prompt(range(prompt)), "max_tokens": max_tokens}


def idle(count: int) -> list[FakeReplica]:
    return with_loads(*[ReplicaLoad()] * count)


def build() -> CostAwareBalancer:
    return CostAwareBalancer(prompt_token_s=1, output_token_s=10, rng=random.Random(1))


def scores(balancer: CostAwareBalancer, replicas: list[FakeReplica], of: Task) -> list[float]:
    return [candidate.score for candidate in balancer.decide(of, replicas).candidates]


def dispatch(balancer: CostAwareBalancer, replica: FakeReplica, of: Task) -> None:
    balancer.dispatched(of, replica, balancer.decide(of, [replica]))


def run(balancer: CostAwareBalancer, replica: FakeReplica, of: Task, seconds: float, output_tokens: int) -> None:
    dispatch(balancer, replica, of)
    balancer.began(of, replica, 0)
    balancer.ended(of, replica, seconds, output_tokens)


def test_the_cost_is_that_of_prompt_and_expected_output() -> None:
    assert scores(build(), idle(1), task(prompt=100, max_tokens=5)) == [100 + 5 * 10]


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        pytest.param(None, 256, id="no limit: the first guess"),
        pytest.param(1000, (256 + 1000 * 99) / 100, id="what was seen, the guess counting as one"),
        pytest.param(1023, (256 + 1000 * 99) / 100, id="limits of one magnitude share a mean"),
        pytest.param(600, 600, id="never more than the limit"),
        pytest.param(16, (256 + 8 * 99) / 100, id="limits of another magnitude have their own"),
    ],
)
def test_the_expected_output_is_the_mean_for_the_limits_magnitude(max_tokens: int | None, expected: float) -> None:
    balancer, (replica,) = CostAwareBalancer(prompt_token_s=1, output_token_s=1), idle(1)
    for number in range(99):
        for limit, tokens in ((1000, 1000), (16, 8)):
            # Equal to the estimate, so that the correction is 1.
            run(balancer, replica, task(f"{limit}-{number}", 1, limit), seconds=1.0 + tokens, output_tokens=tokens)
    (score,) = scores(balancer, [replica], {"prompt": Prompt([0]), "max_tokens": max_tokens})
    assert score == pytest.approx(1 + expected)


def test_decode_work_and_kv_pressure_add_prompt_tokens() -> None:
    loads = with_loads(ReplicaLoad(decode_tokens=1000), ReplicaLoad(kv_usage=0.5), ReplicaLoad())
    assert scores(build(), loads, task(prompt=100, max_tokens=5)) == [150 + 10, 150 + 1500, 150]


def test_without_a_prompt_it_counts_as_512_tokens() -> None:
    assert scores(build(), idle(1), {"max_tokens": 5}) == [512 + 5 * 10]


def test_a_dispatched_request_counts_until_it_ends() -> None:
    balancer, (left, right) = build(), idle(2)
    first, second = task("first", 300, 2), task("second", 100, 5)
    dispatch(balancer, left, first)
    assert scores(balancer, [left, right], second) == [320 + 150, 150]
    balancer.began(first, left, 250)
    assert scores(balancer, [left, right], second) == [20 + 150, 150]
    balancer.ended(first, left, 70.0, 2)
    # 50 prompt tokens were not cached: the estimate of 50 + 2 * 10 seconds equals the observed time.
    assert scores(balancer, [left, right], second) == pytest.approx([150, 150])


def test_the_least_work_wins_even_with_more_requests() -> None:
    balancer, (left, right) = build(), idle(2)
    dispatch(balancer, left, task("long", 10_000))
    for number in range(5):
        dispatch(balancer, right, task(f"short {number}", 100))
    decision = balancer.decide(task("next"), [left, right])
    assert (decision.position, decision.reason, decision.fallback) == (1, "least-cost", "no-history")


def test_a_request_without_an_output_is_released_and_not_observed() -> None:
    balancer, replicas = build(), idle(1)
    dispatch(balancer, replicas[0], task())
    balancer.ended(task(), replicas[0], 999.0, 0)
    assert scores(balancer, replicas, task("next")) == [150]
    assert balancer.decide(task("next"), replicas).fallback == "no-history"


def test_a_second_end_or_one_of_an_unknown_request_changes_nothing() -> None:
    balancer, replicas = build(), idle(2)
    dispatch(balancer, replicas[0], task())
    for _ in range(2):
        balancer.ended(task(), replicas[0], 1.0, 0)
    balancer.began(task(), replicas[1], None)
    balancer.ended(task(), replicas[1], 1.0, 5)
    assert scores(balancer, replicas, task("next")) == [150, 150]


def test_the_correction_is_observed_over_estimated_mixed_with_the_fleets() -> None:
    balancer, (slow, fresh) = build(), idle(2)
    run(balancer, slow, task(prompt=100, max_tokens=5), seconds=1500.0, output_tokens=5)
    # The estimate is 150 s; the prior is four such requests at the usual ratio.
    usual = (1500 + 4 * 150) / (150 + 4 * 150)
    correction = (1500 + 4 * 150 * usual) / (150 + 4 * 150)
    expected = [150 * correction, 150 * usual]
    assert scores(balancer, [slow, fresh], task("next")) == pytest.approx(expected)
    assert balancer.decide(task("next"), [slow, fresh]).fallback == ""


def test_a_slow_replica_gets_fewer_requests_and_is_tried_again_later() -> None:
    balancer, (slow, usual) = build(), idle(2)
    for number in range(50):
        run(balancer, slow, task(f"slow {number}"), seconds=600.0, output_tokens=5)
        run(balancer, usual, task(f"usual {number}"), seconds=150.0, output_tokens=5)
    slow_score, usual_score = scores(balancer, [slow, usual], task("next"))
    assert slow_score > 2 * usual_score
    for number in range(500):
        run(balancer, usual, task(f"later {number}"), seconds=150.0, output_tokens=5)
    slow_score, usual_score = scores(balancer, [slow, usual], task("next"))
    assert slow_score == pytest.approx(usual_score, rel=0.01)


def test_a_lost_replica_leaves_no_state() -> None:
    balancer, (replica,) = build(), idle(1)
    run(balancer, replica, task("past"), seconds=1500.0, output_tokens=5)
    dispatch(balancer, replica, task("lost"))
    balancer.replica_lost(replica)
    balancer.ended(task("lost"), replica, 1.0, 5)
    assert repr(balancer) == "<CostAwareBalancer [0 replicas, 0 requests]>"


def test_ten_thousand_requests_leave_no_state() -> None:
    balancer, (replica,) = CostAwareBalancer(), idle(1)
    for number in range(10_000):
        run(balancer, replica, task(str(number), prompt=number % 97 + 1), seconds=0.1, output_tokens=3)
    assert repr(balancer) == "<CostAwareBalancer [1 replicas, 0 requests]>"


def test_requests_of_other_heads_count_like_this_one() -> None:
    replicas = with_loads(ReplicaLoad(requests=2, others=2), ReplicaLoad())
    assert scores(build(), replicas, task()) == [3 * 150, 150]
    assert build().select({}, with_queues(3, 1, 2)) == 1
