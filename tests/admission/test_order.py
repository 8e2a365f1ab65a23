"""The order of requests: classes, priorities, and tenants by their weights; and who leaves headroom."""

from collections import Counter
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_omni_plugin.admission import AdmissionConfig, RequestClass, RequestTerms, TenantSettings, Ticket
from vllm_omni_plugin.admission.tenant_accounts import MAX_ACCOUNTS, TenantAccounts

from .fakes import admission, come, served

CLASSES = (RequestClass(name="first", priority_at_most=0), RequestClass(name="last"))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-2, 3), st.integers(1, 5000)), max_size=40))
def test_no_request_of_a_class_goes_before_one_of_a_higher_class(requests: list[tuple[str, int, int]]) -> None:
    rules = admission(AdmissionConfig(classes=CLASSES))
    tickets = [come(rules, tenant, tokens, priority) for tenant, priority, tokens in requests]
    order = served(rules, tickets)
    assert [ticket.class_name for ticket in order] == sorted(ticket.class_name for ticket in order)
    priorities = [(ticket.class_name, ticket.priority) for ticket in order]
    assert priorities == sorted(priorities)


@pytest.mark.parametrize(
    ("tenant", "priority", "expected"),
    [("", 0, "first"), ("", -5, "first"), ("", 1, "last"), ("slow", 0, "last"), ("quick", 9, "first")],
)
def test_the_class_is_that_of_the_tenant_or_else_of_the_priority(tenant: str, priority: int, expected: str) -> None:
    tenants = {"slow": TenantSettings(class_name="last"), "quick": TenantSettings(class_name="first")}
    rules = admission(AdmissionConfig(classes=CLASSES, tenants=tenants))
    assert come(rules, tenant, priority=priority).class_name == expected


def test_a_priority_that_no_class_takes_is_in_the_last_one() -> None:
    rules = admission(AdmissionConfig(classes=(CLASSES[0], RequestClass(name="last", priority_at_most=5))))
    assert come(rules, priority=9).class_name == "last"


# Each serves some thousand requests.
@settings(max_examples=25)
@given(
    st.dictionaries(st.sampled_from("abcde"), st.sampled_from([0.5, 1.0, 2.0, 4.0]), min_size=2), st.integers(0, 2**32)
)
def test_busy_tenants_get_tokens_by_their_weights(weights: dict[str, float], seed: int) -> None:
    rng = Random(seed)
    plan = AdmissionConfig(tenants={name: TenantSettings(weight=weight) for name, weight in weights.items()})
    rules = admission(plan)
    largest = {name: rng.choice([50, 100, 200]) for name in weights}
    tickets = []
    for name, weight in weights.items():
        tokens = 0.0
        while tokens < 12_000 * weight:
            tickets.append(come(rules, name, rng.randint(1, largest[name])))
            tokens += tickets[-1].tokens
    rng.shuffle(tickets)
    got: Counter[str] = Counter()
    goal = 8_000 * sum(weights.values())
    for ticket in served(rules, tickets):
        got[ticket.tenant.name] += ticket.tokens
        if got.total() >= goal:
            break
    for name, weight in weights.items():
        assert got[name] == pytest.approx(8_000 * weight, rel=0.1)


def test_a_late_tenant_gets_its_share_at_once_but_not_what_it_missed() -> None:
    rules = admission()
    early = [come(rules, "a") for _ in range(100)]
    served(rules, early[:50])
    late = [come(rules, "b") for _ in range(50)]
    order = [ticket.tenant.name for ticket in served(rules, [*early[50:], *late])]
    assert order[:20].count("a") == pytest.approx(10, abs=1)


def test_long_answers_delay_the_tenants_later_requests() -> None:
    rules = admission()
    for _ in range(40):
        served(rules, [come(rules, "long")], output_tokens=900)
        served(rules, [come(rules, "short")])
    waiting = [come(rules, name) for _ in range(50) for name in ("long", "short")]
    first = served(rules, waiting)[:33]
    counts = Counter(ticket.tenant.name for ticket in first)
    assert counts["short"] > 4 * counts["long"]


def test_a_longer_answer_than_expected_is_charged_at_its_end() -> None:
    rules = admission()
    running = come(rules, "a")
    rules.started(running)
    come(rules, "b")
    before = come(rules, "a").start_tag
    rules.ended(running, 5000, 0.0)
    assert come(rules, "a").start_tag >= before + 5000


def test_a_request_that_never_started_costs_its_tenant_nothing() -> None:
    rules = admission()
    kept = come(rules, "a")
    given_up = [come(rules, "a") for _ in range(100)]
    for ticket in given_up:
        rules.ended(ticket, 0, 0.0)
    assert come(rules, "a").start_tag == kept.start_tag + kept.virtual_cost


def test_an_idle_tenant_neither_saves_nor_owes_anything() -> None:
    rules = admission()
    served(rules, [come(rules, "a", 10_000)])
    served(rules, [come(rules, "b", 100) for _ in range(200)])
    assert come(rules, "a").start_tag == come(rules, "new").start_tag


def test_tickets_keep_their_order_when_requests_start() -> None:
    rules = admission()
    tickets = [come(rules, "a"), come(rules, "b"), come(rules, "a")]
    order = sorted(tickets)
    rules.started(order[0])
    assert sorted(tickets) == order


def test_ten_thousand_invented_tenants_delay_no_configured_tenant() -> None:
    plan = AdmissionConfig(tenants={"known": TenantSettings()})
    rules = admission(plan)
    served(rules, [come(rules, "known")])
    before = come(rules, "known").start_tag
    waiting = [come(rules, f"made-up-{number}") for number in range(10_000)]
    after = come(rules, "known")
    assert after.start_tag == pytest.approx(before + 100)
    served(rules, waiting)
    assert come(rules, "known").start_tag == pytest.approx(after.start_tag + 100)


def test_accounts_of_invented_tenants_are_bounded_and_drop_no_configured_one() -> None:
    accounts = TenantAccounts(AdmissionConfig(tenants={"known": TenantSettings()}))
    known, busy = accounts.get_or_create("known"), accounts.get_or_create("busy")
    accounts.add_in_flight(busy, 0.0)
    for number in range(25_000):
        accounts.get_or_create(f"made-up-{number}" + "x" * 1000)
    assert len(list(accounts)) == 10_000 + 2
    assert (accounts.get("known"), accounts.get("busy")) == (known, busy)
    assert max(len(account.name) for account in accounts) == 128


@pytest.mark.parametrize("recently_used", [False, True])
def test_a_tenant_that_left_the_file_is_the_first_idle_one_to_be_dropped_unless_recently_used(
    recently_used: bool,
) -> None:
    accounts = TenantAccounts(AdmissionConfig(tenants={"left": TenantSettings()}))
    others = [accounts.get_or_create(f"made-up-{number}") for number in range(MAX_ACCOUNTS)]
    left = accounts.get_or_create("left")
    if recently_used:
        accounts.add_in_flight(left, 0.0)
        accounts.remove_in_flight(left, 1.0)
    accounts.replace(AdmissionConfig())
    dropped = [account for account in (left, *others) if accounts.get(account.name) is not account]
    assert dropped == [others[0] if recently_used else left]


def test_queue_position_has_the_class_and_the_requests_ahead() -> None:
    rules = admission(AdmissionConfig(classes=CLASSES), send_rate=2.0, unstarted=3)
    for _ in range(5):
        come(rules, "a")
    come(rules, "a", priority=1)
    assert rules.queue_position(RequestTerms("b"), 1, 0.0) == ("last", 6.0, 4.5, True)
    assert rules.queue_position(RequestTerms("a"), 0, 0.0) == ("first", 5.0, 4.0, False)
    # Only some of another tenant's queue starts before it.
    assert rules.queue_position(RequestTerms("b"), 0, 0.0) == ("first", 1.0, 2.0, False)


def test_a_request_that_starts_or_ends_twice_counts_once() -> None:
    rules = admission()
    ticket: Ticket = come(rules, "a")
    rules.started(ticket)
    rules.started(ticket)
    rules.started(ticket)
    rules.started(ticket)
    rules.ended(ticket, 7, 0.0)
    rules.ended(ticket, 7, 0.0)
    assert rules.backlog == (0, 0)
    assert rules.tenant_reports()[1][:3] == ((0, 0), 0, 107)


def test_a_new_tenant_goes_before_requests_that_wait_for_slower_replicas() -> None:
    rules = admission()
    waiting = [come(rules, "a") for _ in range(10)]
    # Requests of a faster replica start first, out of order.
    for ticket in waiting[5:]:
        rules.started(ticket)
    late = come(rules, "b")
    assert sorted([*waiting[:5], late]).index(late) == 1


def test_a_tenant_over_its_share_leaves_headroom_while_others_are_active() -> None:
    rules = admission()
    served(rules, [come(rules, "calm")])
    assert not rules.is_over_share(come(rules, "flood"), 1.0)
    for _ in range(3):
        rules.started(come(rules, "flood"))
    flood, calm = come(rules, "flood"), come(rules, "calm", now=1.0)
    assert (rules.is_over_share(flood, 1.0), rules.is_over_share(calm, 1.0)) == (True, False)
    rules.ended(calm, 0, 2.0)
    assert (rules.is_over_share(flood, 61.9), rules.is_over_share(flood, 62.1)) == (True, False)


def test_a_burst_does_not_put_a_tenant_over_its_share() -> None:
    rules = admission()
    # For half a minute the flood has three quarters; then most running requests are the calm tenant's.
    for second in range(30):
        for tenant, tokens in (("calm", 100), ("flood", 300)):
            ticket = come(rules, tenant, tokens, now=second)
            rules.started(ticket)
            rules.ended(ticket, 0, second + 1.0)
    running = [come(rules, "calm", 100, now=30.0) for _ in range(5)]
    for ticket in running:
        rules.started(ticket)
    flood, calm = come(rules, "flood", now=30.0), come(rules, "calm", now=30.0)
    assert (rules.is_over_share(flood, 30.0), rules.is_over_share(calm, 30.0)) == (True, False)
    # Usage of ended requests decays, that of running requests does not.
    assert (rules.is_over_share(flood, 70.0), rules.is_over_share(calm, 70.0)) == (False, True)


def test_usage_while_alone_does_not_count_when_another_tenant_starts() -> None:
    rules = admission()
    for second in range(30):
        ticket = come(rules, "calm", 100, now=second)
        rules.started(ticket)
        rules.ended(ticket, 0, second + 1.0)
    running = come(rules, "calm", 100, now=30.0)
    rules.started(running)
    flood = [come(rules, "flood", 100, now=30.0) for _ in range(3)]
    for ticket in flood[:2]:
        rules.started(ticket)
    assert (rules.is_over_share(flood[2], 30.0), rules.is_over_share(come(rules, "calm", now=30.0), 30.0)) == (
        True,
        False,
    )
    # A tenant with requests in the last minute is not new: its earlier usage counts.
    rules.ended(running, 0, 31.0)
    rules.ended(flood[0], 0, 31.0)
    later = come(rules, "calm", 300, now=32.0)
    rules.started(later)
    assert rules.is_over_share(later, 32.0)


def test_ended_requests_leave_no_rounding_error_in_the_usage() -> None:
    rules = admission(AdmissionConfig(tenants={"a": TenantSettings(weight=3)}))
    for name in "abcab":
        ticket = come(rules, name, tokens=7)
        rules.started(ticket)
        rules.replace(AdmissionConfig())
        rules.ended(ticket, 1000, 0.0)
        rules.ended(ticket, 1000, 0.0)
    first = come(rules, "d", now=100.0)
    rules.started(first)
    assert not rules.is_over_share(first, 100.0)


def test_lower_classes_leave_headroom_as_long_as_a_higher_class_waits() -> None:
    rules = admission(AdmissionConfig(classes=CLASSES))
    first = come(rules, priority=0)
    last = come(rules, priority=1, now=100.0)
    assert rules.is_over_share(last, 100.0)
    rules.started(first)
    assert not rules.is_over_share(last, 100.0)
    rules.replace(AdmissionConfig(classes=(RequestClass(name="new", priority_at_most=-1), *CLASSES)))
    come(rules, priority=0, now=100.0)
    assert rules.is_over_share(last, 100.0)
