"""A head's life in simulated time: at every rest nothing is left of any request, and load is as even as it was."""

import asyncio
import logging
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from simulated_week import drifts, is_sound
from simulator.contenders import build
from week.clients import ANSWERED, FAILED, GIVEN_UP, REFUSED
from week.simulated import Outcome, Settings, simulate
from week.virtual_time import VirtualTimeLoop

from vllm_omni_plugin.admission import AdmissionConfig, RequestClass, TenantSettings
from vllm_omni_plugin.balancing import Decision, LeastQueueLengthBalancer, ReplicaView, Task
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger

HOURS = Settings(days=0.07, requests=30, replicas=4, fault=0.9, seed=6)
"""40 bursts, most of them with a fault."""


PLAN = AdmissionConfig(
    classes=(RequestClass(name="first", priority_at_most=0), RequestClass(name="last", deadline=2.0)),
    max_waiting_requests=60,
    max_wait=3.0,
    tenants={
        "heavy": TenantSettings(weight=3),
        "few": TenantSettings(max_in_flight=3),
        "slow": TenantSettings(tokens_per_s=50),
    },
)


def run(policy: str, settings: Settings = HOURS) -> Outcome:
    return simulate(build(policy, settings.seed), policy, settings)  # type: ignore[arg-type]


@pytest.mark.parametrize("policy", ["prefix", "least-queue-length", "session"])
def test_after_hours_of_bursts_and_faults_nothing_is_left_of_any_request(policy: str) -> None:
    outcome = run(policy)
    assert outcome.left == {}
    assert (outcome.ends.total(), outcome.ends[FAILED], outcome.wrong) == (outcome.sent, 0, 0), outcome.examples
    # What it is worth depends on what has happened.
    assert outcome.rests > 30
    assert outcome.moves > 5
    assert len(outcome.happened) == 7
    assert min(outcome.ends[end] for end in (ANSWERED, GIVEN_UP)) > 0


@pytest.mark.parametrize("policy", ["prefix", "least-tokens"])
def test_after_hours_of_refusals_losses_and_recalls_nothing_is_left_in_the_queue_or_of_any_tenant(policy: str) -> None:
    outcome = run(policy, replace(HOURS, requests=60, seed=5, plan=PLAN))
    assert outcome.left == {}
    assert (outcome.ends.total(), outcome.ends[FAILED], outcome.wrong) == (outcome.sent, 0, 0), outcome.examples
    assert outcome.rests > 30
    assert min(outcome.moves, outcome.recalls) > 10
    assert min(outcome.ends[end] for end in (ANSWERED, GIVEN_UP, REFUSED)) > 20


def test_the_same_seed_gives_the_same_hours() -> None:
    settings = replace(HOURS, days=0.03)
    first, second = run("prefix", settings), run("prefix", settings)
    assert (first.ends, first.moves, list(first.in_flight)) == (second.ends, second.moves, list(second.in_flight))


def test_a_charge_that_is_not_released_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = LoadLedger.release

    def forget_some(ledger: LoadLedger, run: Any, now: float) -> None:
        if run.output_tokens == 7:
            run.output_tokens = 6
        release(ledger, run, now)

    monkeypatch.setattr(LoadLedger, "release", forget_some)
    assert set(run("least-queue-length").left) == {"decode tokens", "work of all"}


class EverMoreToTheFirst(LeastQueueLengthBalancer):
    """Sends a growing part of the requests to one replica, as a load balancer does whose accounts drift."""

    def __init__(self) -> None:
        super().__init__(random.Random(0))
        self._draw = random.Random(1)
        self._asked = 0

    def decide(self, task: Task, replicas: Sequence[ReplicaView]) -> Decision:
        self._asked += 1
        if self._draw.uniform(0, 4_000) < self._asked:
            return Decision(0, "drift")
        return super().decide(task, replicas)


def test_load_that_becomes_less_even_is_found() -> None:
    outcome = simulate(EverMoreToTheFirst(), "drifting", Settings(days=0.25, requests=15, replicas=6, fault=0.0))
    verdicts = {what: verdict for what, *_, verdict in drifts(outcome)}
    assert verdicts["variation of requests in flight"] == "grows"
    assert verdicts["variation of requests sent"] == "grows"
    assert not is_sound(outcome)


@pytest.fixture
def unlogged() -> Iterator[None]:
    """Each loss of a replica is a line, and pytest keeps all lines until a test ends, so the process would grow."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.long
@pytest.mark.usefixtures("unlogged")
@pytest.mark.parametrize("policy", ["prefix", "least-tokens", "session"])
def test_a_week_leaves_nothing_and_load_stays_as_even(policy: str) -> None:
    outcome = run(policy, Settings(requests=10))
    assert is_sound(outcome), (outcome.left, outcome.examples, drifts(outcome))


@pytest.mark.long
@pytest.mark.usefixtures("unlogged")
def test_a_week_of_refusals_leaves_nothing_and_the_head_grows_no_larger() -> None:
    outcome = run("prefix", Settings(requests=15, replicas=4, plan=PLAN))
    assert is_sound(outcome), (outcome.left, outcome.examples, drifts(outcome))


def test_virtual_time_passes_at_once_and_in_order() -> None:
    async def day() -> tuple[float, list[str]]:
        loop, seen = asyncio.get_running_loop(), list[str]()
        loop.call_later(3600, seen.append, "later")
        loop.call_later(60, seen.append, "sooner")
        await asyncio.sleep(86_400)
        return loop.time(), seen

    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        now, seen = runner.run(day())
    assert (now, seen) == (pytest.approx(86_400), ["sooner", "later"])


def test_waiting_for_an_impossible_event_is_an_error() -> None:
    loop = VirtualTimeLoop()
    future = loop.create_future()
    with pytest.raises(RuntimeError, match="nothing will bring about"):
        loop.run_until_complete(future)
    loop.close()
