"""Metrics of tenants: a bounded number of labels, and counters that never decrease."""

import random

import pytest

from vllm_omni_plugin.admission import Admission, AdmissionConfig, TenantSettings, tenant_accounts
from vllm_omni_plugin.admission.tenant_labels import MAX_LABELS

from .fakes import admission, come, served


def tokens(rules: Admission) -> dict[str | None, int]:
    """Served tokens by tenant; None: all others."""
    named, other = rules.tenant_reports()
    return {None: other.served_tokens, **{name: report.served_tokens for name, report in named.items()}}


def test_counters_never_decrease(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tenant_accounts, "MAX_ACCOUNTS", 500)
    rules, rng, before, all_served = admission(), random.Random(0), {None: 0}, 0
    for step in range(60):
        for _ in range(60):
            length = rng.randint(1, 500)
            served(rules, [come(rules, f"t{int(rng.expovariate(0.02))}", length)])
            all_served += length
        come(rules, f"waits-{step}", 10_000)
        if step == 30:
            for number in range(500):
                served(rules, [come(rules, f"made-up-{number}", 1)])
                all_served += 1
        now = tokens(rules)
        assert len(now) <= MAX_LABELS + 1
        assert all(now[name] >= before[name] for name in now.keys() & before.keys())
        assert sum(now.values()) <= all_served
        before = now


def test_a_tenant_with_twice_the_tokens_takes_the_label_of_the_least_served() -> None:
    rules = admission()
    for number in range(MAX_LABELS):
        served(rules, [come(rules, f"t{number}", 100 + number)])
    for _ in range(3):
        served(rules, [come(rules, "late", 100)])
    assert tokens(rules) == {None: 300, **{f"t{number}": 100 + number for number in range(MAX_LABELS)}}
    served(rules, [come(rules, "late", 100)])
    assert tokens(rules) == {None: 300, "late": 100, **{f"t{number}": 100 + number for number in range(1, MAX_LABELS)}}


def test_ten_thousand_invented_tenants_take_few_labels_and_none_of_the_file() -> None:
    rules, names = admission(), set[str | None]()
    for number in range(10_000):
        served(rules, [come(rules, f"made-up-{number}", number + 1)])
        names |= tokens(rules).keys() if number % 500 == 0 else set()
    assert len(names) < 5 * MAX_LABELS
    rules.replace(AdmissionConfig(tenants={"known": TenantSettings(weight=3)}))
    assert tokens(rules)["known"] == 0
    served(rules, [come(rules, f"more-{number}", 1_000_000) for number in range(100)])
    served(rules, [come(rules, "known", 7)])
    named, _ = rules.tenant_reports()
    assert (named["known"].served_tokens, named["known"].weight) == (7, 3)
    assert len(named) == MAX_LABELS


def test_at_most_fifty_tenants_of_the_file_have_labels() -> None:
    rules = admission(AdmissionConfig(tenants={f"t{number}": TenantSettings() for number in range(60)}))
    served(rules, [come(rules, "t59", 7), come(rules, "other", 8)])
    assert tokens(rules) == {None: 15, **{f"t{number}": 0 for number in range(MAX_LABELS)}}


def test_all_other_tenants_share_one_counter() -> None:
    rules = admission()
    for number in range(MAX_LABELS + 5):
        come(rules, f"t{number}", 10)
    _, other = rules.tenant_reports()
    assert other[:3] == ((5, 50), 5, 0)
