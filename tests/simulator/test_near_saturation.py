"""Bounds refuse requests above the capacity, and none at a load just below it.

Users of another router had one request in seven refused near saturation without notice.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
from simulator.admitting_head import AdmittingHead, OnlyStage
from simulator.contenders import AT_ONCE, build
from simulator.overloads import overload
from simulator.profiles import accelerator
from simulator.several_heads import SeveralHeads, SharingHead
from simulator.simulation import Simulation
from simulator.workload import Scale, Workload

from vllm_omni_plugin.admission import Admission, AdmissionConfig, Backlog, RequestClass

SCALE = Scale(replicas=4, requests=1500, settings=accelerator())
BOUNDS = AdmissionConfig(
    classes=(RequestClass(name="interactive", deadline=2.0),),
    max_waiting_requests=64,
    max_waiting_tokens=64 * 512,
    max_wait=2.0,
)


@dataclass(kw_only=True)
class SharedStage(OnlyStage):
    """The stage as one of two heads sees it; it knows the other head's backlog at once."""

    rules: list[Admission]
    other: int

    @property
    def other_heads_backlog(self) -> Mapping[str, Backlog]:
        return self.rules[self.other].backlog_by_class()


class AdmittingSharingHead(AdmittingHead, SharingHead):
    """One of two heads with bounds."""

    def __init__(self, *args: Any, rules: list[Admission], **admission: Any) -> None:
        super().__init__(*args, **admission)
        self._stage: Any = SharedStage(flow=self._stage.flow, heads=2, rules=rules, other=1 - len(rules))
        self._admission = Admission(admission["config"], self._stage)
        rules.append(self._admission)


def workload(load: float) -> Workload:
    return replace(overload(SCALE, load), admission=BOUNDS)


def simulation(load: float, policy: str = "prefix", heads: int = 1) -> Simulation:
    policies = [build(policy, seed) for seed in range(heads)]
    simulation = Simulation(workload(load), policies[0], SCALE.settings, SCALE.replicas)
    if heads == 2:
        of_all = SCALE.settings, simulation._clock, simulation._after, simulation._send
        head = partial(
            AdmittingSharingHead, rules=[], config=BOUNDS, refuse=simulation._refuse, after=simulation._after
        )
        simulation._head = SeveralHeads(
            policies, simulation._replicas, *of_all, 0.1, aware=True, rng=random.Random(0), make_head=head
        )
    return simulation


@cache
def full_load() -> float:
    """The load that equals the capacity, measured on a saturated fleet."""
    done_per_s = simulation(4.0, "prefix" + AT_ONCE).run().summary().requests_per_s
    last = max(session.starts for session in workload(1.0).sessions)
    return done_per_s / (SCALE.requests / last)


@pytest.mark.parametrize("heads", [1, 2])
def test_no_request_is_refused_at_95_percent_of_capacity(heads: int) -> None:
    done = simulation(0.95 * full_load(), heads=heads).run().summary()
    assert (done.answered, done.refused) == (SCALE.requests, 0.0)


@pytest.mark.parametrize("heads", [1, 2])
def test_the_same_bounds_refuse_requests_above_capacity(heads: int) -> None:
    assert simulation(1.5 * full_load(), heads=heads).run().summary().refused > 0.15
