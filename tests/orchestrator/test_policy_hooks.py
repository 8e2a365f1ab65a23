"""Hooks of policies, counts of their decisions, and faulty policies, which cost no request."""

import asyncio
import logging
from concurrent.futures import Future

import pytest

from tests.fakes.fleet import FakeFleet
from tests.fakes.policies import NotingPolicy
from vllm_omni_plugin.admission import RequestTerms
from vllm_omni_plugin.balancing import CacheChange, Decision, LeastQueueLengthBalancer, LoadBalancer, Task
from vllm_omni_plugin.errors import NoExplanationError, NoReplicaError, OmniError
from vllm_omni_plugin.orchestrator.pool.policy_guard import POLICY_FAULT, UNEXPLAINED, PolicyGuard
from vllm_omni_plugin.orchestrator.pool.stage_pool import BOUND
from vllm_omni_plugin.orchestrator.requests.counters import count_reason
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ChosenReplicas, Explain, Explanation


class SelectOnly:
    """A policy that can do no more than it must."""

    def select(self, task: object, replicas: object) -> int:
        return 1


async def explain(fleet: FakeFleet, task: Task, stage_id: int = 0) -> Explanation:
    reply: Future[Explanation] = Future()
    fleet.orchestrator.rpc_async_queue.put(Explain(stage_id, task, reply, RequestTerms(), None))
    async with asyncio.timeout(5):
        return await asyncio.wrap_future(reply)


async def test_hooks_follow_an_attempt() -> None:
    policy = NotingPolicy(position=1)
    async with FakeFleet(balancer=policy) as fleet:
        await fleet.submit("a", prompt=[1, 2, 3])
        link, attempt = fleet.attempt("a")
        link.output(attempt, 7, cached=2)
        fleet.now = 5.0
        link.output(attempt, 8, 9, finish_reason="stop")
    assert policy.notes == [("assigned", 1, "a", "noted"), ("began", 1, "a", 2), ("ended", 1, "a", 5.0, 3, [7, 8, 9])]


async def test_a_policy_knows_the_prompt_that_is_sent_and_its_session() -> None:
    policy = NotingPolicy()
    async with FakeFleet(replicas=3, balancer=policy) as fleet:
        await fleet.submit("a", prompt=[1, 2], session="s", length=9)
        fleet.attempt("a")[0].say_dead()
        fleet.say("a", 7, 8)
        fleet.kill(1)
    first, again, resumed = policy.tasks
    assert (first["request_id"], first["session"], first["max_tokens"]) == ("a", "s", 9)
    assert first["prompt"].token_ids == [1, 2]
    # What a policy has computed of a prompt can be kept with it.
    assert again["prompt"] is first["prompt"]
    assert resumed["prompt"].token_ids == [1, 2, 7, 8]


async def test_an_attempt_that_is_aborted_before_its_first_output_ends_without_beginning() -> None:
    policy = NotingPolicy()
    async with FakeFleet(balancer=policy) as fleet:
        await fleet.submit("a")
        await fleet.abort("a")
        await fleet.submit("b")
        fleet.say("b", finish_reason="error")
    assert [(what, request) for what, _, request, *_ in policy.notes] == [
        ("assigned", "a"),
        ("ended", "a"),
        ("assigned", "b"),
        ("ended", "b"),
    ]


async def test_a_lost_replica_is_forgotten_before_its_requests_are_assigned_again() -> None:
    policy = NotingPolicy()
    async with FakeFleet(balancer=policy) as fleet:
        await fleet.submit("a", prompt=[1, 2])
        link, attempt = fleet.attempt("a")
        link.output(attempt, 7, 8)
        link.say_dead()
        link, attempt = fleet.attempt("a")
        assert fleet.pool.member(1).load.prefill_tokens == 4
        link.output(attempt, 9, finish_reason="stop")
    assert policy.notes == [
        ("assigned", 0, "a", "noted"),
        ("began", 0, "a", None),
        ("replica_lost", 0),
        ("assigned", 1, "a", "noted"),
        ("began", 1, "a", None),
        ("ended", 1, "a", 0.0, 1, [9]),
    ]


async def test_cache_changes_reach_the_policy_while_the_replica_serves() -> None:
    policy, change = NotingPolicy(), CacheChange(stored=[1])
    async with FakeFleet(balancer=policy) as fleet:
        assert fleet.pool.wants_cache_events
        member = fleet.pool.member(1)
        fleet.pool.cache_changed(member, change)
        fleet.lose(1)
        fleet.pool.cache_changed(member, change)
    assert policy.notes == [("cache_changed", 1, change), ("replica_lost", 1)]
    assert not PolicyGuard(SelectOnly()).wants_cache_events


@pytest.mark.parametrize("fault", [RuntimeError("bug"), SystemExit(1)], ids=repr)
async def test_a_policy_whose_hooks_fail_costs_no_request(
    fault: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    policy = NotingPolicy()
    policy.fault = fault
    async with FakeFleet(balancer=policy) as fleet:
        with caplog.at_level(logging.ERROR):
            for name in "abc":
                await fleet.submit(name)
                link, attempt = fleet.attempt(name)
                link.output(attempt, 1)
                link.output(attempt, finish_reason="stop")
        assert [reason for _, reason in await fleet.read()] == [None, "stop"] * 3
        assert fleet.in_flight == [0, 0]
    assert [record.message.partition("`")[2].partition("`")[0] for record in caplog.records] == [
        "assigned",
        "began",
        "ended",
    ]
    assert all("NotingPolicy" in record.message for record in caplog.records)


class Nonsense(NotingPolicy):
    """Returns or raises what it was made with."""

    def __init__(self, answer: object) -> None:
        super().__init__()
        self._answer = answer

    def decide(self, task: object, replicas: object) -> Decision:
        if isinstance(self._answer, BaseException):
            raise self._answer
        return self._answer  # type: ignore[return-value]


class Unexplained:
    """The same, for a policy that only selects."""

    def __init__(self, answer: object) -> None:
        self.select = Nonsense(answer).decide


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(Nonsense(None), id="nothing"),
        pytest.param(Nonsense(1), id="a position"),
        pytest.param(Nonsense(Decision(2, "x")), id="beyond the end"),
        pytest.param(Nonsense(Decision(-1, "x")), id="before the beginning"),
        pytest.param(Nonsense(Decision("1", "x")), id="no number"),  # type: ignore[arg-type]
        pytest.param(Nonsense(Decision(0, ["x"])), id="a reason that labels nothing"),  # type: ignore[arg-type]
        pytest.param(Nonsense(Decision(0, "x", fallback=None)), id="no fallback text"),  # type: ignore[arg-type]
        pytest.param(Nonsense(Decision(0, "x", matched_tokens=-5)), id="less than nothing matched"),
        pytest.param(Nonsense(Decision(0, "x", matched_tokens=0.5)), id="half a token matched"),  # type: ignore[arg-type]
        pytest.param(Nonsense(RuntimeError("bug")), id="an error"),
        pytest.param(Nonsense(SystemExit(1)), id="more than an error"),
        *[
            pytest.param(Unexplained(answer), id=repr(answer))
            for answer in (RuntimeError("bug"), 2, -1, None, "0", 0.5)
        ],
    ],
)
async def test_an_invalid_decision_costs_no_request(policy: LoadBalancer, caplog: pytest.LogCaptureFixture) -> None:
    async with FakeFleet(balancer=policy) as fleet:
        with caplog.at_level(logging.ERROR):
            for name in "abcd":
                await fleet.submit(name)
        assert fleet.in_flight == [2, 2]
        assert fleet.orchestrator.metrics.decision_fallbacks == {(0, type(policy).__name__, POLICY_FAULT): 4}
        with pytest.raises(NoExplanationError, match=type(policy).__name__):
            await explain(fleet, {})
    assert len(caplog.records) == 1


async def test_every_assignment_is_one_counted_decision() -> None:
    async with FakeFleet(balancer=NotingPolicy(matched_tokens=2)) as fleet:
        await fleet.submit("a", prompt=[1, 2, 3])
        fleet.attempt("a")[0].say_dead()
        await fleet.submit("b", affinity=7)
        metrics = fleet.orchestrator.metrics
        assert metrics.decisions == {(0, "NotingPolicy", "noted"): 2, (0, "NotingPolicy", BOUND): 1}
        assert sum(metrics.decisions.values()) == sum(member.assignments for member in fleet.pool.members)
        state = fleet.orchestrator.request_states["b"].runs[0]
        assert state.decision == Decision(0, BOUND, by_policy=False)


async def test_a_policy_that_only_selects_is_counted_under_one_reason() -> None:
    async with FakeFleet(balancer=SelectOnly()) as fleet:
        await fleet.submit("a")
        assert fleet.orchestrator.metrics.decisions == {(0, "SelectOnly", UNEXPLAINED): 1}
        assert fleet.in_flight == [0, 1]


async def test_predicted_and_reported_tokens_are_counted_of_the_same_attempts() -> None:
    async with FakeFleet(balancer=NotingPolicy(matched_tokens=2)) as fleet:
        for name, cached in (("a", 1), ("b", None)):
            await fleet.submit(name, prompt=[1, 2, 3])
            link, attempt = fleet.attempt(name)
            link.output(attempt, 1, cached=cached)
            link.output(attempt, 1)
        metrics = fleet.orchestrator.metrics
        assert (metrics.matched_tokens, metrics.cached_tokens) == (2, 1)


def test_a_policy_that_invents_reasons_does_not_fill_the_memory() -> None:
    counts: dict[tuple[int, str, str], int] = {}
    for index in range(1000):
        count_reason(counts, (0, "p", f"reason {index}"))
    assert len(counts) < 100
    assert sum(counts.values()) == 1000
    assert counts[0, "p", "other"] > 900


async def test_sends_are_recorded_until_the_first_output() -> None:
    chosen_replicas: ChosenReplicas = []
    async with FakeFleet(replicas=3, balancer=NotingPolicy()) as fleet:
        await fleet.submit("a", chosen_replicas=chosen_replicas)
        fleet.attempt("a")[0].say_dead()
        fleet.say("a", 7)
        fleet.kill(1)
        assert fleet.orchestrator.request_states["a"].runs[0].attempts == 3
    assert [(replica, decision.reason) for replica, decision in chosen_replicas] == [("0.0", "noted"), ("0.1", "noted")]


async def test_an_explanation_changes_nothing() -> None:
    policy = NotingPolicy(position=1, matched_tokens=2)
    async with FakeFleet(balancer=policy) as fleet:
        await fleet.submit("a", prompt=[1, 2, 3])
        notes, metrics = list(policy.notes), fleet.orchestrator.metrics
        explanation = await explain(fleet, {})
        assert (explanation.policy, explanation.decision.position) == ("NotingPolicy", 1)
        assert [(name, load.requests) for name, load in explanation.replicas] == [("0.0", 0), ("0.1", 1)]
        assert policy.notes == notes
        assert (fleet.in_flight, sum(metrics.decisions.values())) == ([0, 1], 1)


@pytest.mark.parametrize(
    ("balancer", "replicas", "stage_id", "error"),
    [
        pytest.param(SelectOnly(), 1, 0, NoExplanationError, id="select only"),
        pytest.param(LeastQueueLengthBalancer(), 0, 0, NoReplicaError, id="no replica"),
        pytest.param(LeastQueueLengthBalancer(), 1, 3, LookupError, id="no stage"),
    ],
)
async def test_an_impossible_explanation_is_an_error(
    balancer: LoadBalancer, replicas: int, stage_id: int, error: type[OmniError]
) -> None:
    async with FakeFleet(replicas=replicas, balancer=balancer) as fleet:
        with pytest.raises(error):
            await explain(fleet, {}, stage_id)


@pytest.mark.parametrize(
    ("method", "args", "result", "clears"),
    [
        ("reset_prefix_cache", (False, False), True, True),
        ("reset_prefix_cache", (False, False), False, False),
        ("pause_scheduler", ("abort", True), None, True),
        ("pause_scheduler", ("keep", False), None, False),
        ("sleep", (1, "abort"), None, True),
        ("sleep", (0, "abort"), None, False),
        ("release_kv_cache_memory", (), None, True),
        ("reset_mm_cache", (), None, False),
    ],
)
async def test_a_policy_is_notified_of_caches_that_calls_clear(
    method: str, args: tuple[object, ...], result: object, clears: bool
) -> None:
    policy = NotingPolicy()
    async with FakeFleet(balancer=policy, replicas=1) as fleet:
        fleet.links[0].on_call = lambda link, call_id, method, args: link.answer(call_id, result)
        await fleet.call(method, *args)
    assert policy.notes == ([("cache_cleared", 0)] if clears else [])
