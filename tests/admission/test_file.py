"""Admission files: what is read from valid ones, and the error message of each invalid one."""

from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from msgspec.structs import fields

from vllm_omni_plugin.admission import AdmissionConfig, RequestClass, TenantSettings, load_admission
from vllm_omni_plugin.admission.admission_config import schema
from vllm_omni_plugin.errors import ConfigError

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "admission.yaml"
HUGE = "1" + "0" * 400
"""An integer that no float can be."""
PAGE = (ROOT / "docs" / "admission.md").read_text()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "admission.yaml"


def complaint(file: Path, text: str) -> str:
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_admission(file)
    return str(raised.value).removeprefix(f"{file}:")


def test_every_key_is_read(file: Path) -> None:
    file.write_text(
        """
classes:
  - {name: a, priority_at_most: -1, deadline: 2.5, max_waiting_requests: 7.0, max_waiting_tokens: 8, max_wait: 9}
  - name: b
max_waiting_requests: 10
max_waiting_tokens: 11
max_wait: 12
tenants:
  x: {weight: 0.5, class: b, max_in_flight: 13, tokens_per_s: 14, burst_tokens: 15}
default_tenant: {class: a}
"""
    )
    a = RequestClass(
        name="a", priority_at_most=-1, deadline=2.5, max_waiting_requests=7, max_waiting_tokens=8, max_wait=9.0
    )
    x = TenantSettings(weight=0.5, class_name="b", max_in_flight=13, tokens_per_s=14.0, burst_tokens=15)
    assert load_admission(file) == AdmissionConfig(
        classes=(a, RequestClass(name="b")),
        max_waiting_requests=10,
        max_waiting_tokens=11,
        max_wait=12.0,
        tenants={"x": x},
        default_tenant=TenantSettings(class_name="a"),
    )


def test_an_empty_file_is_the_default_config(file: Path) -> None:
    file.write_text("{}")
    assert load_admission(file) == AdmissionConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", " the file is empty"),
        ("[]", "1: must be a mapping, not []"),
        ("\nclases: []", "2: clases: unknown key (did you mean 'classes'?): use classes, max_waiting_requests, "),
        ("classes: []", "1: classes: must not be empty"),
        ("classes:\n- deadline: 3", "2: classes[0]: needs 'name'"),
        ("classes:\n- name: a\n- name: a", "3: classes[1].name: there is a class 'a' already"),
        ("classes:\n- name: a b", "2: classes[0].name: must be letters, digits, dashes and underscores"),
        (f"classes: [{'{name: a}, ' * 17}]", "1: classes: must have at most 16 entries, not 17"),
        ("classes:\n- name: a\n  dead_line: 3", "3: classes[0].dead_line: unknown key (did you mean 'deadline'?)"),
        ("max_wait: 0", "1: max_wait: must be above 0, not 0"),
        ("headroom: large", "1: headroom: unknown key: use classes, max_waiting_requests, "),
        ("max_wait: .nan", "1: max_wait: must be a number, not NaN"),
        ("max_wait: .inf", "1: max_wait: must be a number, not Infinity"),
        ("max_waiting_requests: 1.5", "1: max_waiting_requests: must be a whole number, not 1.5"),
        pytest.param(f"max_wait: {HUGE}", f"1: max_wait: must be a number, not {HUGE[:60]}...", id="too large"),
        ("max_waiting_requests: 1.0e+30", "1: max_waiting_requests: must be a whole number below 2**53, not 1e+30"),
        pytest.param(
            f"max_waiting_tokens: {HUGE}", "1: max_waiting_tokens: must be a whole number below ", id="a count"
        ),
        ("max_waiting_requests: 0", "1: max_waiting_requests: must be at least 1, not 0"),
        ("tenants:\n  a: {weight: 0}", "2: tenants.a.weight: must be at least 0.001, not 0"),
        ("tenants:\n  a: {weight: 1000001}", "2: tenants.a.weight: must be at most 1000000, not 1000001"),
        ("tenants:\n  a: {tokens_per_s: 1.0e-320}", "2: tenants.a.tokens_per_s: must be at least 0.001, not 1e-320"),
        ("tenants:\n  a: {burst_tokens: 3}", "2: tenants.a: 'burst_tokens' needs 'tokens_per_s'"),
        ("tenants:\n  '': {}", "2: tenants['']: must not be empty"),
        (f"tenants:\n  {'x' * 129}: {{}}", f"2: tenants.{'x' * 129}: must have at most 128 characters, not 129"),
        (
            "classes: [{name: batch}, {name: chat}]\ntenants:\n  a:\n    class: batsh",
            "4: tenants.a.class: there is no class 'batsh' (did you mean 'batch'?): use one of batch, chat",
        ),
        ("default_tenant: {class: x}", "1: default_tenant.class: there is no class 'x': use one of default"),
    ],
)
def test_the_first_error_is_reported_with_its_line(file: Path, text: str, message: str) -> None:
    assert complaint(file, text).startswith(message)


def test_a_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml: cannot be read: No such file or directory"):
        load_admission(tmp_path / "nothing.yaml")


def test_the_schema_is_valid_and_describes_each_key() -> None:
    Draft202012Validator.check_schema(dict(schema()))
    parts: list[Any] = [schema(), schema()["$defs"]["class"], schema()["$defs"]["tenant"]]
    assert [key for part in parts for key, value in part["properties"].items() if not value["description"]] == []


@pytest.mark.parametrize(
    ("struct", "part"),
    [
        (AdmissionConfig, schema()),
        (RequestClass, schema()["$defs"]["class"]),
        (TenantSettings, schema()["$defs"]["tenant"]),
    ],
)
def test_the_schema_and_the_page_have_the_keys_of_the_config(struct: Any, part: Any) -> None:
    keys = {field.encode_name for field in fields(struct)}
    assert set(part["properties"]) == keys
    assert [key for key in keys if f"| `{key}` |" not in PAGE] == []


def test_the_example_loads() -> None:
    plan = load_admission(EXAMPLE)
    assert [each.name for each in plan.classes] == ["interactive", "batch"]
    assert plan.tenants["acme"].weight == 4
