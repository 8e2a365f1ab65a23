"""Summaries, rankings and tables."""

from dataclasses import replace

import numpy as np
import pytest
from simulator.contenders import OMNISCIENT
from simulator.metrics import Metrics, Summary
from simulator.report import ranking
from simulator.requests import Request

SUMMARY = Summary((0.1, 0.2, 0.4), (1.0, 2.0, 3.0), 0.15, 1.2, 42.0, 0.75, 0.05, 0.01, 99)


def answered(arrived: float, first: float, last: float, cached: int = 0) -> Request:
    request = Request(1, [0] * 100, [0] * 10, 10, None)
    request.arrived, request.first_token, request.finished, request.cached_tokens = arrived, first, last, cached
    return request


class FakeReplica:
    """Was busy for some of its time."""

    def __init__(self, busy_s: float, present_s: float) -> None:
        self.busy_s = busy_s
        self.present_s = present_s


def test_a_summary_of_known_requests() -> None:
    metrics = Metrics()
    metrics.answered(answered(1.0, 1.5, 3.0, cached=50))
    metrics.answered(answered(2.0, 2.1, 5.0, cached=0))
    metrics.refused = 1
    metrics.end([FakeReplica(1.0, 4.0), FakeReplica(6.0, 8.0), FakeReplica(0.0, 0.0)])  # type: ignore[list-item]
    summary = metrics.summary()
    assert summary.ttft[0] == pytest.approx(0.3)
    assert summary.latency == pytest.approx(np.quantile([2.0, 3.0], (0.5, 0.9, 0.99)))
    assert summary.requests_per_s == pytest.approx(2 / 4)
    assert summary.hit_rate == pytest.approx(50 / 200)
    assert summary.refused == pytest.approx(1 / 3)
    # Busy for 25% and 75% of the time.
    assert summary.spread == pytest.approx(0.5)


def test_the_ranking_is_relative_to_the_best_of_each_workload() -> None:
    worse = replace(SUMMARY, ttft=(0.1, 0.2, 1.6), mean_latency=1.2)
    ranks = ranking(
        {"one": {"prefix": SUMMARY, "random": worse}, "other": {"prefix": SUMMARY, "random": SUMMARY, "rest": SUMMARY}}
    )
    assert [(rank.policy, rank.ttft, rank.latency, rank.score) for rank in ranks] == [
        ("prefix", pytest.approx(1.0), pytest.approx(1.0), pytest.approx(1.0)),
        ("random", pytest.approx(2.0), pytest.approx(1.0), pytest.approx(2**0.5)),
    ]


def test_the_omniscient_policy_is_not_the_measure() -> None:
    ranks = ranking({"one": {OMNISCIENT: replace(SUMMARY, ttft=(0.0, 0.0, 0.1)), "random": SUMMARY}})
    assert {rank.policy: rank.ttft for rank in ranks} == {
        OMNISCIENT: pytest.approx(0.25),
        "random": pytest.approx(1.0),
    }
