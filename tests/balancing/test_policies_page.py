"""docs/policies.md has the options, formulas and reasons of the policies."""

import inspect
import math
import re
from pathlib import Path

import pytest

from vllm_omni_plugin.balancing import LoadBalancer, LoadBalancingPolicy, build_load_balancer_factory
from vllm_omni_plugin.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text()
OPTION_ROW = re.compile(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|", re.MULTILINE)
CODE_BLOCK = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
WORD_IN_CODE = re.compile(r"`([a-z]+(?:-[a-z]+)*)`")

every_policy = pytest.mark.parametrize("policy", list(LoadBalancingPolicy))


def section(policy: LoadBalancingPolicy) -> str:
    (text,) = re.findall(rf"^## `{policy}`\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


def class_of(policy: LoadBalancingPolicy) -> type[LoadBalancer]:
    return type(build_load_balancer_factory(policy)())


def docstring(policy: LoadBalancingPolicy) -> str:
    return " ".join((inspect.getdoc(class_of(policy)) or "").split())


def constructor_defaults(policy: LoadBalancingPolicy) -> dict[str, object]:
    parameters = inspect.signature(class_of(policy)).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.name != "rng"}


@every_policy
def test_its_options_and_defaults_are_those_of_its_constructor(policy: LoadBalancingPolicy) -> None:
    on_page = {name: float(default) for name, default, _ in OPTION_ROW.findall(section(policy))}
    assert on_page == constructor_defaults(policy)


@every_policy
def test_its_ranges_are_those_it_honours(policy: LoadBalancingPolicy) -> None:
    for name, _, allowed in OPTION_ROW.findall(section(policy)):
        lowest, highest = re.fullmatch(r"([\d.]+|whole)(?: or more| to ([\d.]+))?", allowed.strip()).groups()  # type: ignore[union-attr]
        honoured = [float(bound) for bound in (lowest, highest) if bound not in (None, "whole")]
        refused = [honoured[0] - 1e-7] if honoured else [0.5]
        refused += [honoured[1] + 1e-7] if len(honoured) > 1 else [math.inf]
        for value in honoured:
            build_load_balancer_factory(policy, {name: value})
        for value in refused:
            with pytest.raises(ConfigError, match=f"option {name}: "):
                build_load_balancer_factory(policy, {name: value})


@every_policy
def test_its_formulas_are_those_of_the_docstring(policy: LoadBalancingPolicy) -> None:
    for block in CODE_BLOCK.findall(section(policy)):
        for line in block.splitlines():
            assert " ".join(line.split()) in docstring(policy)


@every_policy
def test_the_reason_of_a_decision_is_on_the_page(policy: LoadBalancingPolicy) -> None:
    said = set(WORD_IN_CODE.findall(docstring(policy)))
    decision = build_load_balancer_factory(policy)().decide({}, [_Replica()])  # type: ignore[attr-defined]
    for word in {decision.reason, decision.fallback} - {""}:
        assert f"`{word}`" in section(policy)
    reasons = {word for word in said if "-" in word}
    assert reasons <= set(WORD_IN_CODE.findall(section(policy)))


@every_policy
def test_it_is_in_the_table(policy: LoadBalancingPolicy) -> None:
    assert f"| [`{policy}`](#{policy}) |" in PAGE


class _Replica:
    input_addr = "tcp://replica:1"
    output_addr = "tcp://head:1"
    stage_id = 0
    queue_length = 0
