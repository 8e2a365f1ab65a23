"""No policy beats the bounds, and one queue in front of all engines follows the engines' rules."""

import random

import bounds
import pytest
from simulate import Run, simulate
from simulator.contenders import OURS, PEERS
from simulator.one_queue import OneQueue
from simulator.profiles import accelerator
from simulator.requests import Request
from simulator.simulation import LINK_S
from simulator.traffic import Requests, tokens
from simulator.workload import Scale

from vllm_omni_plugin.balancing import known_policies

SETTINGS = accelerator()
POLICIES = [*(name for name in OURS if name in known_policies()), "prefix at once", *PEERS]


def asked_at(*arrivals: float, prompt_tokens: int = 1000) -> list[Request]:
    rng = random.Random(0)
    made = Requests(rng)
    requests = [made.make(tokens(rng, prompt_tokens), 5, 5) for _ in arrivals]
    for request, arrived in zip(requests, arrivals, strict=True):
        request.arrived = arrived
    return requests


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("workload", ["bursty", "tenants"])
def test_no_policy_is_below_the_bound(workload: str, seed: int) -> None:
    scale = Scale(4, 60, SETTINGS, seed)
    bound = bounds.bound(workload, scale)
    reached = {policy: simulate(scale, Run(workload, policy)).summary.ttft[-1] for policy in POLICIES}
    assert 0 < bound <= min(reached.values())


@pytest.mark.parametrize("ahead", [False, True])
def test_one_queue_is_not_below_the_bound(ahead: bool) -> None:
    scale = Scale(4, 120, SETTINGS)
    assert bounds.bound("bursty", scale) <= bounds.one_queue(scale, ahead)


def test_the_contexts_with_the_fewest_waiting_requests_come_last() -> None:
    needed_s = 2048 * SETTINGS.prefill_token_s + SETTINGS.step_s
    popular, rare = [0.0] * 99, [0.0]
    assert bounds.bound_contexts(SETTINGS, 1, 2048, [rare, popular]) == pytest.approx(needed_s + 2 * LINK_S, abs=0.001)
    assert bounds.bound_contexts(SETTINGS, 1, 2048, [popular, popular]) == pytest.approx(
        2 * needed_s + 2 * LINK_S, abs=0.001
    )


def test_a_request_that_finds_an_idle_engine_takes_as_long_as_alone() -> None:
    alone_s = SETTINGS.duration(1000, 0) + 2 * LINK_S
    for ahead in (False, True):
        assert OneQueue(SETTINGS, 2, 1024, ahead).run(asked_at(0.0, 0.0)) == pytest.approx([alone_s] * 2)


def test_a_prompt_that_does_not_fit_into_a_step_waits_for_its_own_step() -> None:
    step_s = SETTINGS.duration(1000, 0)
    first, second, third = sorted(OneQueue(SETTINGS, 1, 1024, ahead=False).run(asked_at(0.0, 0.01, 0.02)))
    assert first == pytest.approx(step_s + 2 * LINK_S)
    assert second == pytest.approx(2 * step_s + SETTINGS.sequence_s - 0.01 + 2 * LINK_S)
    assert third == pytest.approx(3 * step_s + 3 * SETTINGS.sequence_s - 0.02 + 2 * LINK_S)
