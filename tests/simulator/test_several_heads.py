"""Several heads on simulated engines: nothing is lost, and they do not herd."""

import pytest
import spread
from simulator.profiles import accelerator
from simulator.workload import Scale
from simulator.workloads import WORKLOADS

SMALL = Scale(8, 240, accelerator())
LARGE = Scale(16, 600, accelerator())
"""Enough for heads to herd."""


def of(policy: str, heads: int, delay: str, workload: str = "steady", scale: Scale = SMALL) -> spread.Spread:
    return spread.simulate(scale, spread.Run(workload, policy, heads, delay))


@pytest.mark.parametrize("policy", spread.POLICIES)
def test_every_request_is_answered(policy: str) -> None:
    summary = of(policy, 4, "100").summary
    assert (summary.answered, summary.refused) == (240, 0)


@pytest.mark.parametrize("policy", ["prefix", "prefix at once", "kv-aware"])
@pytest.mark.parametrize("workload", ["churn", "cold-joiners"])
def test_every_request_is_answered_although_replicas_come_and_go(workload: str, policy: str) -> None:
    asked = sum(len(session.turns) for session in WORKLOADS[workload](SMALL).sessions)
    summary = of(policy, 4, "100", workload).summary
    assert (summary.answered, summary.refused) == (asked, 0)


def test_the_same_seed_gives_the_same_run() -> None:
    assert of("prefix", 4, "100") == of("prefix", 4, "100")


@pytest.mark.parametrize("policy", [pytest.param("prefix", marks=pytest.mark.long), "least-queue-length"])
def test_heads_with_late_reports_spread_load_better_than_heads_without_reports(policy: str) -> None:
    assert of(policy, 8, "100", scale=LARGE).in_flight < of(policy, 8, "none", scale=LARGE).in_flight


def test_heads_that_look_in_the_same_place_find_what_others_have_sent() -> None:
    assert of("prefix", 8, "100", "multi-turn").summary.hit_rate > 0.6


def test_the_spread_is_that_of_what_all_heads_have_sent() -> None:
    alone = of("least-queue-length", 1, "none")
    chance = of("random", 1, "none")
    assert alone.in_flight < chance.in_flight
    assert alone.work < chance.work
