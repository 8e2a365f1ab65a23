"""Refusals and evictions: bounds, deadlines and limits."""

import heapq
from collections import Counter
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_plugin.admission import (
    Admission,
    AdmissionConfig,
    Backlog,
    RefusalReason,
    RequestClass,
    RequestTerms,
    TenantSettings,
    Ticket,
    TicketPhase,
)
from vllm_omni_plugin.errors import RequestRefusedError

from .fakes import admission, come, served, try_to_come

CLASSES = (RequestClass(name="first", priority_at_most=0), RequestClass(name="last"))
FIVE = AdmissionConfig(classes=CLASSES, max_waiting_requests=5)


def refused(admission: Admission, tenant: str = "", **request: Any) -> RequestRefusedError:
    """A request comes and is refused."""
    outcome = try_to_come(admission, tenant, **request)[1]
    assert isinstance(outcome, RequestRefusedError)
    return outcome


def evictions(admission: Admission, tenant: str = "", **request: Any) -> list[tuple[Ticket, int]]:
    """A request comes and may wait. Returns the tickets evicted for it, with their statuses."""
    outcome = try_to_come(admission, tenant, **request)[1]
    assert isinstance(outcome, list)
    assert {refusal.reason for _, refusal in outcome} <= {RefusalReason.EVICTED}
    return [(ticket, int(refusal.status)) for ticket, refusal in outcome]


def test_a_full_queue_refuses_a_tenant_with_429_if_it_has_more_than_its_share_else_with_503() -> None:
    rules = admission(FIVE)
    for _ in range(5):
        come(rules)
    refusal = refused(rules)
    assert (refusal.status, refusal.reason) == (503, RefusalReason.QUEUE_FULL)
    assert rules.backlog.requests == 5
    rules = admission(FIVE)
    for name in "aaaab":
        come(rules, name)
    assert refused(rules, "a").status == 429
    # Also if the other tenant's requests all run.
    rules = admission(FIVE)
    rules.started(come(rules, "b"))
    for name in "aaaaa":
        come(rules, name)
    assert refused(rules, "a").status == 429


def test_the_newest_request_of_the_longest_queue_is_evicted() -> None:
    rules = admission(FIVE)
    tickets = [come(rules, name) for name in "aaabb"]
    assert evictions(rules, "c") == [(tickets[2], 429)]
    assert rules.backlog.requests == 5


def test_a_queue_is_long_by_tokens_and_weight() -> None:
    plan = AdmissionConfig(max_waiting_requests=4, tenants={"a": TenantSettings(weight=4)})
    rules = admission(plan)
    come(rules, "a", 100)
    come(rules, "a", 100)
    come(rules, "b", 10)
    longest = come(rules, "c", 60)
    assert evictions(rules, "b", tokens=20) == [(longest, 429)]


def test_a_tenant_whose_queue_has_shrunk_loses_no_request() -> None:
    rules = admission(FIVE)
    left = [come(rules, "a") for _ in range(4)]
    for ticket in left[:3]:
        rules.ended(ticket, 0, 0.0)
    tickets = [come(rules, name) for name in "bbbc"]
    assert evictions(rules, "c") == [(tickets[2], 429)]
    assert evictions(rules, "d") == [(tickets[1], 429)]


def test_the_lowest_class_is_evicted_first_and_never_evicts_a_higher_one() -> None:
    rules = admission(FIVE)
    for _ in range(4):
        come(rules, "a")
    low = come(rules, "b", priority=1)
    assert evictions(rules, "a") == [(low, 503)]
    refusal = refused(rules, "c", priority=1)
    assert (refusal.status, refusal.reason) == (503, RefusalReason.QUEUE_FULL)
    assert rules.backlog_by_class() == {"first": (5, 500), "last": (0, 0)}


def test_started_requests_are_never_evicted() -> None:
    rules = admission(AdmissionConfig(max_waiting_requests=1))
    running = come(rules, "a", 1000)
    rules.started(running)
    waiting = come(rules, "b", 100)
    assert evictions(rules, "c", tokens=10) == [(waiting, 429)]


def test_a_refused_request_evicts_no_other() -> None:
    rules = admission(AdmissionConfig(max_waiting_tokens=1000))
    tickets = [come(rules, "a", 100) for _ in range(6)] + [come(rules, "b", 50) for _ in range(8)]
    # After enough evictions its own tenant would have the longest queue.
    assert refused(rules, "c", tokens=500).reason is RefusalReason.QUEUE_FULL
    assert rules.backlog == (14, 1000)
    assert evictions(rules, "c", tokens=10) == [(tickets[5], 429)]


def test_one_request_alone_fits_whatever_its_size() -> None:
    rules = admission(AdmissionConfig(max_waiting_tokens=1000))
    come(rules, "a", 5000)
    assert refused(rules, "a", tokens=10)


def test_a_class_has_bounds_of_its_own() -> None:
    last = RequestClass(name="last", max_waiting_requests=1)
    rules = admission(AdmissionConfig(classes=(CLASSES[0], last)))
    come(rules, priority=1)
    assert refused(rules, priority=1).status == 503
    for _ in range(10):
        come(rules)


def test_the_bound_in_seconds_follows_the_measured_rate() -> None:
    rules = admission(AdmissionConfig(max_wait=2.0), send_rate=2.0, unstarted=1)
    for _ in range(4):
        come(rules)
    assert refused(rules).reason is RefusalReason.QUEUE_FULL
    rules = admission(AdmissionConfig(max_wait=2.0))
    for _ in range(100):
        come(rules)


def test_requests_at_other_heads_count_except_those_of_lower_classes() -> None:
    others = {"first": Backlog(2, 200), "last": Backlog(90, 9000)}
    rules = admission(FIVE, other_heads_backlog=others)
    for _ in range(3):
        come(rules)
    assert refused(rules).status == 503
    rules = admission(FIVE, other_heads_backlog=others)
    assert refused(rules, priority=1).status == 503


def test_a_deadline_that_cannot_be_kept_is_refused_at_arrival() -> None:
    rules = admission(send_rate=1.0, unstarted=2)
    for _ in range(8):
        come(rules, "a")
    refusal = refused(rules, "a", timeout_s=5.0)
    assert (refusal.status, refusal.reason, refusal.retry_after_s) == (503, RefusalReason.DEADLINE, 3)
    come(rules, "a", timeout_s=8.5)


def test_the_time_in_engines_is_part_of_the_deadline() -> None:
    rules = admission(send_rate=1.0, first_output_s=2.0)
    for _ in range(8):
        come(rules, "a")
    refusal = refused(rules, "a", timeout_s=9.5)
    assert (refusal.reason, refusal.retry_after_s) == (RefusalReason.DEADLINE, 1)
    assert vars(rules.expected_refusal(RequestTerms("a", timeout_s=9.5), None, 0.0)) == vars(refusal)


def test_unstarted_requests_in_engines_do_not_make_a_request_late() -> None:
    rules = admission(send_rate=1.0, unstarted=50)
    come(rules)
    come(rules, timeout_s=2.0)


def test_a_flood_does_not_make_another_tenants_deadline_unreachable() -> None:
    rules = admission(send_rate=1.0)
    for _ in range(100):
        come(rules, "flood")
    assert refused(rules, "flood", timeout_s=5.0).status == 503
    come(rules, "calm", timeout_s=5.0)
    assert refused(rules, "flood", timeout_s=5.0).status == 429


@pytest.mark.parametrize(
    ("deadline", "timeout_s", "first_output_s", "send_s"),
    [
        (10.0, None, 0.0, 10.0),
        (10.0, 3.0, 0.0, 3.0),
        (10.0, 30.0, 0.0, 10.0),
        (None, None, 0.0, inf),
        pytest.param(None, 10.5, 2.0, 8.5, id="the time in engines is taken off"),
        pytest.param(None, 5.0, 60.0, 2.5, id="slow engines leave half of the deadline"),
    ],
)
def test_engines_must_have_a_request_in_time_for_the_shorter_deadline(
    deadline: float | None, timeout_s: float | None, first_output_s: float, send_s: float
) -> None:
    config = AdmissionConfig(classes=(RequestClass(name="only", deadline=deadline),))
    rules, terms = admission(config, first_output_s=first_output_s), RequestTerms("", timeout_s, waited_s=7.0)
    ticket = rules.new_ticket(terms, 0, 1, 107.0)
    assert isinstance(ticket, Ticket)
    assert ticket.send_by == 100.0 + send_s


def test_a_request_that_no_engine_has_in_time_is_refused() -> None:
    rules = admission()
    ticket = come(rules, "a", timeout_s=1.0)
    refusal = rules.expire(ticket, 1.0)
    assert (refusal.status, refusal.reason, refusal.retry_after_s) == (503, RefusalReason.DEADLINE, 1)
    assert rules.backlog.requests == 0
    rules.ended(ticket, 0, 1.0)
    assert rules.tenant_reports()[1].in_flight == 0


def test_retry_after_is_the_time_in_which_the_excess_drains_from_1_to_60_seconds() -> None:
    def retry_after(rate: float, tokens: int, heads: int = 1) -> int:
        rules = admission(AdmissionConfig(max_waiting_tokens=1000), send_rate=rate, heads=heads)
        for _ in range(10):
            come(rules)
        return refused(rules, tokens=tokens).retry_after_s

    # The queue has 10 requests of 100 tokens, so 1,000 tokens too many are 10 requests.
    assert retry_after(1.0, 1000) == 10
    assert retry_after(1.0, 1000, heads=2) == 5
    assert retry_after(100.0, 1000) == 1
    assert retry_after(0.01, 1000) == 60
    assert retry_after(0.0, 1000) == 1


def test_waiting_and_running_requests_are_in_flight() -> None:
    rules = admission(AdmissionConfig(default_tenant=TenantSettings(max_in_flight=2)))
    waiting, running = come(rules, "a"), come(rules, "a")
    rules.started(running)
    refusal = rules.new_ticket(RequestTerms("a"), 0, 1, 0.0)
    assert isinstance(refusal, RequestRefusedError)
    assert (refusal.status, refusal.reason) == (429, RefusalReason.IN_FLIGHT)
    assert vars(rules.expected_refusal(RequestTerms("a"), None, 0.0)) == vars(refusal)
    come(rules, "b")
    rules.ended(waiting, 0, 0.0)
    come(rules, "a")


@pytest.mark.parametrize(
    ("heads", "expected", "says"),
    [
        (1, 5, "has 5 requests in flight at this head, which is its limit (max_in_flight 5)"),
        (
            2,
            3,
            "has 3 requests in flight at this head, which is its part of the limit (max_in_flight 5, divided among 2",
        ),
        (
            8,
            1,
            "has 1 request in flight at this head, which is its part of the limit (max_in_flight 5, divided among 8",
        ),
    ],
)
def test_several_heads_share_the_limit(heads: int, expected: int, says: str) -> None:
    rules = admission(AdmissionConfig(default_tenant=TenantSettings(max_in_flight=5)), heads=heads)
    while isinstance(refusal := rules.new_ticket(RequestTerms("a"), 0, 1, 0.0), Ticket):
        pass
    assert rules.tenant_reports()[1].in_flight == expected
    assert str(refusal).removesuffix(" heads).").removesuffix(".") == f"The tenant {says}"


@pytest.mark.parametrize(
    ("heads", "part"),
    [(1, "its limit (tokens_per_s 10)"), (2, "its part of the limit (tokens_per_s 10, divided among 2 heads)")],
)
def test_a_refusal_says_whose_part_of_the_tokens_is_used(heads: int, part: str) -> None:
    rules = admission(AdmissionConfig(default_tenant=TenantSettings(tokens_per_s=10.0)), heads=heads)
    come(rules, "a", 200)
    refusal = rules.new_ticket(RequestTerms("a"), 0, 1, 0.0)
    assert str(refusal) == f"The tenant has used more tokens at this head than {part}."


def test_a_tenant_may_owe_tokens_and_is_refused_until_they_are_paid() -> None:
    rules = admission(AdmissionConfig(tenants={"a": TenantSettings(tokens_per_s=10.0)}))
    served(rules, [come(rules, "a", 90)])
    served(rules, [come(rules, "a", 60)], output_tokens=50)
    refusal = rules.new_ticket(RequestTerms("a"), 0, 1, 0.0)
    assert isinstance(refusal, RequestRefusedError)
    assert (refusal.status, refusal.reason, refusal.retry_after_s) == (429, RefusalReason.TOKEN_RATE, 10)
    assert isinstance(rules.new_ticket(RequestTerms("a"), 0, 1, 9.9), RequestRefusedError)
    come(rules, "a", now=10.1)


def test_saved_tokens_are_bounded_by_the_burst() -> None:
    rules = admission(AdmissionConfig(tenants={"a": TenantSettings(tokens_per_s=10.0, burst_tokens=30)}))
    come(rules, "a", 31, now=1000.0)
    assert isinstance(rules.new_ticket(RequestTerms("a"), 0, 1, 1000.0), RequestRefusedError)
    come(rules, "a", 1, now=1000.2)


def test_a_request_that_never_started_uses_no_tokens() -> None:
    rules = admission(AdmissionConfig(tenants={"a": TenantSettings(tokens_per_s=10.0)}))
    ticket = come(rules, "a", 500)
    assert rules.expected_refusal(RequestTerms("a"), None, 0.0)
    rules.ended(ticket, 0, 0.0)
    assert rules.expected_refusal(RequestTerms("a"), None, 0.0) is None


def test_how_long_a_request_may_wait_is_known_before_its_class_is() -> None:
    classes = (RequestClass(name="first", priority_at_most=0, deadline=2.0), RequestClass(name="last", deadline=9.0))
    rules = admission(
        AdmissionConfig(classes=classes, tenants={"a": TenantSettings(class_name="first")}), first_output_s=0.5
    )
    assert rules.longest_wait_s(RequestTerms("a")) == 1.5
    assert rules.longest_wait_s(RequestTerms("b")) == 8.5
    # At least half of the deadline.
    assert rules.longest_wait_s(RequestTerms("b", timeout_s=0.6)) == 0.3
    assert admission(FIVE).longest_wait_s(RequestTerms("a")) == inf


def test_an_expected_refusal_with_unknown_priority_assumes_the_best_class() -> None:
    last = RequestClass(name="last", max_waiting_requests=1)
    rules = admission(AdmissionConfig(classes=(CLASSES[0], last)))
    come(rules, priority=1)
    assert rules.expected_refusal(RequestTerms(), None, 0.0) is None
    assert rules.expected_refusal(RequestTerms(), 0, 0.0) is None
    refusal = rules.expected_refusal(RequestTerms(), 1, 0.0)
    assert refusal is not None
    assert refusal.status == 503


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 1), st.integers(1, 300)), max_size=60))
def test_no_request_that_may_wait_has_an_expected_refusal_and_bounds_hold(requests: list[tuple[str, int, int]]) -> None:
    plan = AdmissionConfig(
        classes=(CLASSES[0], RequestClass(name="last", max_waiting_tokens=500)),
        max_waiting_requests=6,
        max_waiting_tokens=1200,
        tenants={"a": TenantSettings(weight=3)},
    )
    rules = admission(plan, send_rate=1.0)
    waiting: dict[int, Ticket] = {}
    for tenant, priority, tokens in requests:
        in_advance = rules.expected_refusal(RequestTerms(tenant), priority, 0.0)
        ticket, outcome = try_to_come(rules, tenant, tokens, priority)
        if isinstance(outcome, RequestRefusedError):
            continue
        assert in_advance is None
        waiting[ticket.number] = ticket
        for each, _ in outcome:
            assert each is not ticket
            del waiting[each.number]
        assert rules.backlog == (len(waiting), sum(each.tokens for each in waiting.values()))
        assert rules.backlog.requests <= 6
        assert rules.backlog.tokens <= 1200 or rules.backlog.requests == 1
    named, other = rules.tenant_reports()
    assert other.in_flight + sum(report.in_flight for report in named.values()) == len(waiting)
    served(rules, waiting.values())
    assert rules.backlog == (0, 0)


def test_each_operation_is_cheap_with_ten_thousand_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Counter[str]()
    for name in ("heappush", "heappop", "heapify"):
        original = getattr(heapq, name)

        def counted(heap: list[Any], *args: Any, name: str = name, original: Any = original) -> Any:
            # A rebuild takes as many steps as there are entries.
            steps["steps"] += len(heap) if name == "heapify" else max(1, len(heap).bit_length())
            return original(heap, *args)

        monkeypatch.setattr(f"vllm_omni_plugin.admission.indexed_heap.{name}", counted)
    rules = admission(AdmissionConfig(max_waiting_requests=10_000))
    tickets = [come(rules, f"t{number % 2000}") for number in range(10_000)]
    assert steps["steps"] / 10_000 < 30
    steps.clear()
    for number in range(500):
        evictions(rules, f"new-{number}")
    assert steps["steps"] / 500 < 90
    steps.clear()
    leaving = [ticket for ticket in tickets if ticket.phase is TicketPhase.WAITING][::7]
    for ticket in leaving:
        rules.ended(ticket, 0, 0.0)
    assert steps["steps"] / len(leaving) < 45


def test_no_request_is_refused_on_arrival_while_nothing_waits() -> None:
    rules = admission(send_rate=0.1, unstarted=2)
    assert rules.expected_refusal(RequestTerms(timeout_s=1.0), None, 0.0) is None
    come(rules)
    assert rules.expected_refusal(RequestTerms(timeout_s=1.0), None, 0.0) is not None


def test_a_dequeued_request_is_enqueued_again_without_a_check() -> None:
    rules = admission(AdmissionConfig(max_waiting_requests=1))
    waited = come(rules)
    rules.dequeue(waited)
    come(rules)
    assert rules.enqueue(waited, 0.0) == []
    assert rules.backlog.requests == 2
