"""The least-tokens policy: expected waits computed by hand."""

from typing import Any

import pytest

from vllm_omni_plugin.balancing import LeastTokensBalancer, Prompt, ReplicaLoad, Task

from .fakes import with_loads

TASK: Task = {"prompt": Prompt(range(1000))}


def waits(*loads: ReplicaLoad, task: Task = TASK, **options: Any) -> list[float]:
    decision = LeastTokensBalancer(**options).decide(task, with_loads(*loads))
    return [candidate.score for candidate in decision.candidates]


@pytest.mark.parametrize(
    ("load", "seconds"),
    [
        pytest.param(ReplicaLoad(prefill_rate=1000), 1.0, id="idle: 1,000 tokens at 1,000 per second"),
        pytest.param(ReplicaLoad(prefill_tokens=3000, prefill_rate=1000), 4.0, id="3,000 tokens before it"),
        pytest.param(ReplicaLoad(decode_tokens=5000, prefill_rate=1000), 1.05, id="a hundredth of what is decoded"),
        pytest.param(ReplicaLoad(others=2, waiting=5, prefill_rate=1000), 3.0, id="two of others wait"),
        pytest.param(ReplicaLoad(others=2, running=2, prefill_rate=1000), 1.02, id="two of others run"),
        pytest.param(ReplicaLoad(others=3, waiting=1, prefill_rate=1000), 2.02, id="one waits, two run"),
        pytest.param(
            ReplicaLoad(others=3, waiting=1, prefill_tokens=500, prefill_rate=1000, heads_report=True),
            1.53,
            id="what others have to compute is known",
        ),
        pytest.param(ReplicaLoad(kv_usage=0.5, prefill_rate=1000), 2.5, id="half full"),
        pytest.param(ReplicaLoad(kv_usage=0.75, prefill_rate=1000), 5.5, id="three quarters full"),
        pytest.param(ReplicaLoad(kv_usage=1.0, prefill_rate=1000), 1 + 1.5 * 99, id="full counts as 99%"),
    ],
)
def test_expected_wait(load: ReplicaLoad, seconds: float) -> None:
    assert waits(load) == [pytest.approx(seconds)]


@pytest.mark.parametrize(
    ("rates", "seconds"),
    [
        pytest.param([1000, 500], [1.0, 2.0], id="half as fast, twice the wait"),
        pytest.param([1000, 0, 2000], [1.0, 0.5, 0.5], id="unmeasured: the median (the upper one of two)"),
        pytest.param([0, 0], [0.1, 0.1], id="none measured: 10,000 per second"),
        pytest.param([1000, 1000, 1], [1.0, 1.0, 8.0], id="at most eight times slower"),
        pytest.param([1000, 1000, 99999], [1.0, 1.0, 0.125], id="at most eight times faster"),
    ],
)
def test_rate_of_a_replica(rates: list[float], seconds: list[float]) -> None:
    assert waits(*(ReplicaLoad(prefill_rate=rate) for rate in rates)) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("options", "seconds"),
    [
        ({"decode_weight": 0.0}, 3.5),
        ({"decode_weight": 1.0}, 4.5),
        ({"kv_tokens": 0.0}, 2.01),
        ({"kv_tokens": 2000}, 4.01),
    ],
)
def test_options_are_weights(options: dict[str, Any], seconds: float) -> None:
    load = ReplicaLoad(prefill_tokens=1000, decode_tokens=1000, kv_usage=0.5, prefill_rate=1000)
    assert waits(load, **options) == [pytest.approx(seconds)]


def test_the_shortest_wait_wins_and_is_explained() -> None:
    loads = [ReplicaLoad(prefill_tokens=tokens, prefill_rate=1000) for tokens in (900, 100, 500)]
    decision = LeastTokensBalancer().decide(TASK, with_loads(*loads))
    assert (decision.position, decision.reason, decision.fallback) == (1, "expected-wait", "")
    assert [candidate.position for candidate in decision.candidates] == [0, 1, 2]


def test_a_slow_replica_gets_its_share_of_work() -> None:
    loads = [ReplicaLoad(prefill_rate=250), ReplicaLoad(prefill_tokens=2000, prefill_rate=1000)]
    assert LeastTokensBalancer().select(TASK, with_loads(*loads)) == 1
    loads[1] = ReplicaLoad(prefill_tokens=4000, prefill_rate=1000)
    assert LeastTokensBalancer().select(TASK, with_loads(*loads)) == 0


def test_without_any_rate_the_decision_says_so_and_tokens_still_count() -> None:
    loads = [ReplicaLoad(prefill_tokens=2), ReplicaLoad(prefill_tokens=1)]
    decision = LeastTokensBalancer().decide(TASK, with_loads(*loads))
    assert (decision.position, decision.fallback) == (1, "no-rate")


def test_without_a_prompt_it_counts_as_512_tokens() -> None:
    assert waits(ReplicaLoad(prefill_rate=1024), task={}) == [pytest.approx(0.5)]
