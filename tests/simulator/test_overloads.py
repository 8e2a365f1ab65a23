"""Overload: the queue is bounded if requests wait at the head, and grows if they are sent at once."""

from dataclasses import replace

import msgspec
import pytest
from simulator.contenders import AT_ONCE, build
from simulator.metrics import Summary
from simulator.overloads import DEADLINE_S, OVERLOADS
from simulator.profiles import accelerator
from simulator.simulation import Simulation
from simulator.workload import Scale

from vllm_omni_plugin.admission import HeadroomSize

SCALE = Scale(replicas=4, requests=1000, settings=accelerator())


def summary(workload: str, policy: str) -> Summary:
    return Simulation(OVERLOADS[workload](SCALE), build(policy, 0), SCALE.settings, SCALE.replicas).run().summary()


@pytest.mark.parametrize("name", OVERLOADS)
def test_requests_arrive_in_order_with_unique_numbers(name: str) -> None:
    sessions = list(OVERLOADS[name](SCALE).sessions)
    starts = [session.starts for session in sessions]
    assert starts == sorted(starts)
    assert len({session.turns[0].number for session in sessions}) == len(sessions)


def test_the_calm_tenant_sends_the_same_requests_alone_and_beside_the_flood() -> None:
    alone = [session.turns[0].tokens for session in OVERLOADS["calm"](SCALE).sessions]
    beside = [session.turns[0] for session in OVERLOADS["flood"](SCALE).sessions]
    assert alone == [request.tokens for request in beside if request.terms.tenant == "calm"]


def test_every_request_is_answered_or_refused() -> None:
    result = summary("overload-4x", "prefix")
    refused = round(result.refused * SCALE.requests)
    assert refused > SCALE.requests / 10
    assert result.answered + refused == SCALE.requests


def test_almost_all_answers_are_in_time_and_throughput_stays() -> None:
    late, at_once = summary("overload-4x", "prefix"), summary("overload-4x", "prefix" + AT_ONCE)
    assert at_once.refused == 0.0
    assert late.ttft[-1] < 1.25 * DEADLINE_S < at_once.ttft[-1]
    assert late.requests_per_s == pytest.approx(at_once.requests_per_s, rel=0.15)


def test_only_the_measured_tenant_counts() -> None:
    count = sum(1 for _ in OVERLOADS["calm"](SCALE).sessions)
    result = summary("flood", "prefix")
    assert result.answered + round(result.refused * count) == count


def test_a_flood_delays_a_calm_tenant_less_if_its_requests_wait_at_the_head() -> None:
    assert summary("flood", "prefix").ttft[-1] < summary("flood", "prefix" + AT_ONCE).ttft[-1] / 2


def test_large_headroom_of_a_small_fleet_shortens_the_calm_tenants_time_to_first_token() -> None:
    flood = OVERLOADS["flood"](SCALE)
    assert flood.admission is not None
    large = replace(flood, admission=msgspec.structs.replace(flood.admission, headroom=HeadroomSize.LARGE))
    result = Simulation(large, build("prefix", 0), SCALE.settings, SCALE.replicas).run().summary()
    assert result.ttft[0] < 0.95 * summary("flood", "prefix").ttft[0]
