"""Metrics of tenants: those of the admission file have a label each, all others one."""

from vllm_omni_plugin.admission import Admission, AdmissionConfig, TenantSettings

from .fakes import admission, come, served


def tokens(rules: Admission) -> dict[str | None, int]:
    """Served tokens by tenant; None: all others."""
    named, other = rules.tenant_reports()
    return {None: other.served_tokens, **{name: report.served_tokens for name, report in named.items()}}


def test_only_tenants_of_the_file_have_a_label() -> None:
    rules = admission(AdmissionConfig(tenants={"known": TenantSettings(weight=3)}))
    served(rules, [come(rules, f"made-up-{number}", 10) for number in range(100)])
    served(rules, [come(rules, "known", 7), come(rules, "", 1)])
    come(rules, "known", 5)
    come(rules, "made-up-1", 20)
    assert tokens(rules) == {None: 1001, "known": 7}
    named, other = rules.tenant_reports()
    assert (named["known"].waiting, named["known"].in_flight, named["known"].weight) == ((1, 5), 1, 3)
    assert (other.waiting, other.in_flight) == ((1, 20), 1)


def test_counters_never_decrease_when_the_file_changes() -> None:
    rules, files = admission(), [AdmissionConfig(tenants={"a": TenantSettings()}), AdmissionConfig()]
    for config in files:
        served(rules, [come(rules, "a", 10)])
        rules.replace(config)
    assert tokens(rules) == {None: 10}
    rules.replace(files[0])
    assert tokens(rules) == {None: 10, "a": 10}
