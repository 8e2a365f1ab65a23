"""Another config while requests wait."""

import pytest

from vllm_omni_plugin.admission import (
    Admission,
    AdmissionConfig,
    RequestClass,
    RequestTerms,
    TenantSettings,
    Ticket,
    config_changes,
)

from .fakes import admission, come, served, try_to_come


def classes(*names: str) -> tuple[RequestClass, ...]:
    return tuple(RequestClass(name=name) for name in names)


def test_waiting_requests_keep_their_places_and_tenants_their_counts() -> None:
    rules = admission(AdmissionConfig(classes=classes("a", "b"), tenants={"one": TenantSettings(class_name="b")}))
    tickets = [come(rules, "one"), come(rules, "two")]
    rules.replace(AdmissionConfig(classes=classes("b", "a"), tenants={"two": TenantSettings(class_name="a")}))
    assert rules.backlog_by_class() == {"b": (1, 100), "a": (1, 100)}
    assert served(rules, tickets) == [tickets[1], tickets[0]]
    named, other = rules.tenant_reports()
    assert (named["two"].served_tokens, other.served_tokens) == (100, 100)


def test_a_removed_class_is_evicted_first_and_vanishes_when_empty() -> None:
    rules = admission(AdmissionConfig(classes=classes("old", "kept"), max_waiting_requests=2))
    old, other = come(rules), come(rules)
    rules.replace(AdmissionConfig(classes=classes("kept"), max_waiting_requests=2))
    assert rules.backlog_by_class() == {"kept": (0, 0), "old": (2, 200)}
    outcome = try_to_come(rules)[1]
    assert isinstance(outcome, list)
    assert [ticket for ticket, _ in outcome] == [other]
    rules.ended(old, 0, 0.0)
    rules.replace(rules.config)
    assert list(rules.backlog_by_class()) == ["kept"]


def test_a_ticket_of_a_removed_class_may_still_wait() -> None:
    rules = admission(AdmissionConfig(classes=classes("old")))
    ticket = rules.new_ticket(RequestTerms(), 0, 1, 0.0)
    assert isinstance(ticket, Ticket)
    rules.replace(AdmissionConfig(classes=classes("new"), max_waiting_requests=9))
    assert rules.enqueue(ticket, 0.0) == []
    assert rules.backlog_by_class() == {"new": (0, 0), "old": (1, 1)}
    rules.started(ticket)
    rules.ended(ticket, 1, 0.0)
    assert rules.backlog == (0, 0)


def test_new_weights_and_limits_apply_to_later_requests() -> None:
    rules = admission(AdmissionConfig(max_waiting_requests=4))
    heavy = [come(rules, "a"), come(rules, "a"), come(rules, "a")]
    light = come(rules, "b", 120)
    assert heavy[2].virtual_cost == 100
    settings = TenantSettings(weight=10, max_in_flight=4)
    rules.replace(AdmissionConfig(max_waiting_requests=4, tenants={"a": settings}))
    outcome = try_to_come(rules, "a")[1]
    assert isinstance(outcome, list)
    assert [ticket for ticket, _ in outcome] == [light]
    assert rules.expected_refusal(RequestTerms("a"), None, 0.0) is not None


def test_changes_are_reported_value_by_value() -> None:
    old = AdmissionConfig(classes=classes("a", "b"), tenants={"x": TenantSettings(weight=2)})
    new = AdmissionConfig(
        classes=(RequestClass(name="b", deadline=5.0), RequestClass(name="c")),
        max_wait=3.0,
        tenants={"x": TenantSettings(class_name="b", weight=2)},
    )
    assert config_changes(old, new) == [
        "classes.a.name: a -> none",
        "classes.a.place: 1 -> none",
        "classes.b.deadline: none -> 5.0",
        "classes.b.place: 2 -> 1",
        "classes.c.name: none -> c",
        "classes.c.place: none -> 2",
        "max_wait: none -> 3.0",
        "tenants.x.class: none -> b",
    ]
    assert config_changes(new, new) == []


def test_a_tenant_over_its_share_still_leaves_headroom_for_tenants_that_were_active_before_the_reload() -> None:
    rules = admission()
    calm = come(rules, "calm")
    rules.started(calm)
    rules.ended(calm, 0, 0.0)
    flood = [come(rules, "flood") for _ in range(3)]
    for ticket in flood:
        rules.started(ticket)
    rules.replace(AdmissionConfig(max_wait=3.0))
    assert (rules.is_over_share(flood[0], 59.0), rules.is_over_share(flood[0], 61.0)) == (True, False)


def in_flight(rules: Admission) -> int:
    named, other = rules.tenant_reports()
    return other.in_flight + sum(report.in_flight for report in named.values())


@pytest.mark.parametrize("name", ["a", "made-up"])
def test_a_tenant_keeps_its_requests_when_it_enters_or_leaves_the_file(name: str) -> None:
    rules = admission(AdmissionConfig(tenants={"a": TenantSettings()}))
    ticket = come(rules, name)
    rules.replace(AdmissionConfig(tenants={"made-up": TenantSettings()}))
    come(rules, name)
    assert in_flight(rules) == 2
    rules.ended(ticket, 0, 0.0)
    assert in_flight(rules) == 1
