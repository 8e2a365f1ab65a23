"""Options of policies: who takes which, and what is said of others."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_omni_plugin.balancing import build_load_balancer_factory
from vllm_omni_plugin.balancing.options import number, whole
from vllm_omni_plugin.errors import ConfigError

from .fakes import with_queues

PLUGIN = """
class Nth:
    def __init__(self, position=0, *, rng=None):
        if position < 0:
            raise ValueError("before the first")
        self._position = position
    def select(self, task, replicas):
        return self._position

class Anything(Nth):
    def __init__(self, **options):
        super().__init__(options.get("which", 0))
"""


@pytest.fixture(autouse=True)
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The importable module `option_policies`."""
    (tmp_path / "option_policies.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("option_policies", None)


@pytest.mark.parametrize(
    ("policy", "options", "expected"),
    [
        ("round-robin", {"start_index": 1}, 1),
        ("round-robin", None, 0),
        ("option_policies:Nth", {"position": 2}, 2),
        ("option_policies:Nth", {}, 0),
        ("option_policies:Anything", {"which": 2}, 2),
    ],
)
def test_options_are_arguments_of_the_constructor(policy: str, options: dict[str, int] | None, expected: int) -> None:
    assert build_load_balancer_factory(policy, options)().select({}, with_queues(0, 0, 0)) == expected


def test_a_factory_keeps_its_options_when_the_callers_dict_changes() -> None:
    options = {"start_index": 1}
    build = build_load_balancer_factory("round-robin", options)
    options["start_index"] = 0
    assert build().select({}, with_queues(0, 0)) == 1


@pytest.mark.parametrize(
    ("policy", "options", "message"),
    [
        pytest.param(
            "random",
            {"weight": 1},
            "load balancing policy 'random': unknown option 'weight': it has no options",
            id="policy without options",
        ),
        pytest.param(
            "least-tokens",
            {"decode_wait": 1},
            "load balancing policy 'least-tokens': unknown option 'decode_wait' (did you mean 'decode_weight'?): "
            "use decode_weight, kv_seconds",
            id="unknown",
        ),
        pytest.param(
            "cost-aware",
            {"zzz": 1},
            "load balancing policy 'cost-aware': unknown option 'zzz': use prompt_token_s, output_token_s",
            id="like no other",
        ),
        pytest.param(
            "power-of-two",
            {"rng": 1},
            "load balancing policy 'power-of-two': unknown option 'rng': it has no options",
            id="randomness is no option",
        ),
        pytest.param(
            "round-robin",
            {"start_index": 1.5},
            "load balancing policy 'round-robin': option start_index: 1.5 is not a whole number",
            id="not whole",
        ),
        pytest.param(
            "option_policies:Nth",
            {"positon": 1},
            "load balancing policy 'option_policies:Nth': unknown option 'positon' (did you mean 'position'?): "
            "use position",
            id="third party, unknown",
        ),
        pytest.param(
            "option_policies:Nth",
            {"position": -1},
            "load balancing policy 'option_policies:Nth' cannot be built with the options {'position': -1} "
            "(ValueError('before the first'))",
            id="third party, refused",
        ),
    ],
)
def test_options_that_cannot_be_honoured_are_refused(policy: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_load_balancer_factory(policy, options)
    assert str(caught.value) == message


@pytest.mark.parametrize("value", [0, 0.5, 1])
def test_a_number_in_range_is_taken(value: float) -> None:
    assert number("share", value, 0, 1) == value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (-0.1, "-0.1 is out of range: give a number from 0 to 1"),
        (1.1, "1.1 is out of range: give a number from 0 to 1"),
        (float("inf"), "inf is not a number"),
        (float("nan"), "nan is not a number"),
        pytest.param(10**400, "is not a number", id="more than a float can be"),
        ("1", "'1' is not a number"),
        (True, "True is not a number"),
        (None, "None is not a number"),
        ([1], r"[1] is not a number"),
    ],
)
def test_what_is_no_number_in_range_is_refused(value: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"^option share: ") as caught:
        number("share", value, 0, 1)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (-1, "-1 is out of range: give a number of 0 or more"),
        (1.0, "1.0 is not a whole number"),
        (True, "True is not a whole number"),
        ("2", "'2' is not a whole number"),
    ],
)
def test_what_is_no_whole_number_in_range_is_refused(value: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"^option blocks: ") as caught:
        whole("blocks", value, 0)
    assert reason in str(caught.value)
