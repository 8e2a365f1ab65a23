"""Policies by name and with options: built-in, installed, and given as a class."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_omni_plugin.balancing import LoadBalancingPolicy, build_load_balancer_factory, known_policies
from vllm_omni_plugin.balancing.policy_options import number, whole
from vllm_omni_plugin.balancing.registry import installed_policies
from vllm_omni_plugin.errors import ConfigError

from .fakes import with_queues

PLUGIN = """
class Last:
    def select(self, task, replicas):
        return len(replicas) - 1

class Dated(Last):
    def forgotten(self, replica):
        pass

class Early(Last):
    def dispatched(self, task, replica, decision):
        pass

class Deaf:
    pass

class Numb:
    select = 3

class Needy:
    def __init__(self, weight):
        pass
    def select(self, task, replicas):
        return 0

class Failing(Last):
    def __init__(self):
        raise OSError("no such table")

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

def last():
    return Last()
"""
BUILT_IN = list(map(str, LoadBalancingPolicy))
Install = Callable[..., None]


@pytest.fixture
def plugin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path` with the module `acme_policies`."""
    (tmp_path / "acme_policies.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("acme_policies", None)
    installed_policies.cache_clear()


@pytest.fixture
def install(plugin_dir: Path) -> Install:
    """Install a distribution with these entry points of our group."""

    def write_metadata(distribution: str, **policies: str) -> None:
        folder = plugin_dir / f"{distribution}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{name.replace('_', '-')} = {value}" for name, value in policies.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[vllm_omni_plugin.lb_policies]", *lines, ""]))
        importlib.invalidate_caches()
        installed_policies.cache_clear()

    return write_metadata


@pytest.mark.parametrize("policy", list(LoadBalancingPolicy))
def test_a_built_in_policy_is_found_by_member_and_by_name(policy: LoadBalancingPolicy) -> None:
    for name in (policy, policy.value):
        found = type(build_load_balancer_factory(name)())
        assert found.__name__ == f"{policy.title().replace('-', '')}Balancer"


def test_a_factory_builds_balancers_that_share_no_state() -> None:
    build, replicas = build_load_balancer_factory("round-robin"), with_queues(0, 0)
    left, right = build(), build()
    assert [left.select({}, replicas), right.select({}, replicas)] == [0, 0]


def test_known_policies_are_the_built_in_then_the_installed(install: Install) -> None:
    assert known_policies() == BUILT_IN
    install("acme", zigzag="acme_policies:Last", acme_last="acme_policies:Last")
    assert known_policies() == [*BUILT_IN, "acme-last", "zigzag"]


def test_an_unknown_name_lists_the_known_and_suggests_the_closest(install: Install) -> None:
    install("acme", acme_last="acme_policies:Last")
    with pytest.raises(ConfigError) as caught:
        build_load_balancer_factory("round_robbin")
    assert str(caught.value) == (
        "unknown load balancing policy 'round_robbin' (did you mean 'round-robin'?): "
        f"use one of {', '.join(BUILT_IN)}, acme-last, or package.module:Class"
    )


@pytest.mark.parametrize(
    ("removed", "instead"), [("power-of-two", "least-queue-length"), ("cost-aware", "least-tokens")]
)
def test_a_removed_policy_is_refused_with_the_one_to_use(install: Install, removed: str, instead: str) -> None:
    with pytest.raises(ConfigError, match=rf"^load balancing policy '{removed}' was removed: use {instead}$"):
        build_load_balancer_factory(removed, {"output_token_s": 1})
    install("acme", **{removed.replace("-", "_"): "acme_policies:Last"})
    assert type(build_load_balancer_factory(removed)()).__name__ == "Last"


BAD_CLASSES = [
    pytest.param("acme_nowhere:Last", r"cannot be imported \(ModuleNotFoundError", id="no such module"),
    pytest.param("acme_policies:First", r"cannot be imported \(AttributeError", id="no such class"),
    pytest.param("acme_policies:last", "is not a class", id="function"),
    pytest.param("acme_policies:Deaf", r"has no method select\(task, replicas\)", id="no select"),
    pytest.param("acme_policies:Numb", r"has no method select\(task, replicas\)", id="select is no method"),
    pytest.param("acme_policies:Dated", "has a hook forgotten, which is called replica_lost now", id="old hook"),
    pytest.param("acme_policies:Early", "has a hook dispatched, which is called assigned now", id="older hook"),
    pytest.param("acme_policies:Needy", "cannot be built without arguments", id="needs an argument"),
    pytest.param("acme_policies:Failing", r"cannot be built without arguments \(OSError", id="constructor raises"),
    pytest.param(
        "vllm_omni_plugin.balancing:LoadBalancer", "cannot be built without arguments", id="the contract itself"
    ),
]


@pytest.mark.parametrize(("name", "reason"), BAD_CLASSES)
def test_an_object_that_is_no_policy_is_refused_when_it_is_named(install: Install, name: str, reason: str) -> None:
    install("acme", broken=name, acme_last="acme_policies:Last")
    assert known_policies() == [*BUILT_IN, "acme-last", "broken"]
    build_load_balancer_factory("random")
    build_load_balancer_factory("acme-last")
    with pytest.raises(ConfigError, match=f"^load balancing policy '{name}' {reason}"):
        build_load_balancer_factory(name)
    with pytest.raises(ConfigError, match=rf"^load balancing policy 'broken' \({name}, installed by acme\) {reason}"):
        build_load_balancer_factory("broken")


@pytest.mark.usefixtures("plugin_dir")
@pytest.mark.parametrize(
    ("name", "reason"), [("acme_policies:", "is not a class"), (":Last", r"cannot be imported \(ValueError")]
)
def test_an_incomplete_class_name_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^load balancing policy '{name}' {reason}"):
        build_load_balancer_factory(name)


def test_a_plugin_that_raises_on_import_is_a_config_error(install: Install, plugin_dir: Path) -> None:
    (plugin_dir / "acme_crash.py").write_text("raise RuntimeError('needs a GPU')\n")
    install("acme", broken="acme_crash:Last")
    with pytest.raises(ConfigError, match=r"cannot be imported \(RuntimeError\('needs a GPU'\)\)"):
        build_load_balancer_factory("broken")


def test_a_plugin_cannot_take_the_name_of_a_built_in_policy(install: Install) -> None:
    install("acme", random="acme_policies:Last")
    assert known_policies() == BUILT_IN
    with pytest.raises(ConfigError, match=r"'random' is provided more than once, by vllm-omni-plugin .* and acme:"):
        build_load_balancer_factory(LoadBalancingPolicy.RANDOM)


def test_two_plugins_cannot_share_a_name(install: Install) -> None:
    install("acme", zigzag="acme_policies:Last")
    install("bolt", zigzag="acme_policies:Last")
    with pytest.raises(ConfigError, match=r"'zigzag' is provided more than once, by (acme and bolt|bolt and acme):"):
        build_load_balancer_factory("zigzag")


@pytest.mark.usefixtures("plugin_dir")
@pytest.mark.parametrize(
    ("policy", "options", "expected"),
    [
        ("round-robin", {"start_index": 1}, 1),
        ("round-robin", None, 0),
        ("acme_policies:Nth", {"position": 2}, 2),
        ("acme_policies:Nth", {}, 0),
        ("acme_policies:Anything", {"which": 2}, 2),
    ],
)
def test_options_are_arguments_of_the_constructor(policy: str, options: dict[str, int] | None, expected: int) -> None:
    assert build_load_balancer_factory(policy, options)().select({}, with_queues(0, 0, 0)) == expected


@pytest.mark.usefixtures("plugin_dir")
@pytest.mark.parametrize(
    ("policy", "options", "fault"),
    [
        ("random", {"weight": 1}, ": unknown option 'weight': it has no options"),
        ("least-tokens", {"decode_wait": 1}, ": unknown option 'decode_wait' (did you mean 'decode_weight'?): use"),
        ("random", {"rng": 1}, ": unknown option 'rng': it has no options"),
        ("round-robin", {"start_index": 1.5}, ": option start_index: 1.5 is not a whole number"),
        ("acme_policies:Nth", {"positon": 1}, ": unknown option 'positon' (did you mean 'position'?): use position"),
        ("acme_policies:Nth", {"position": -1}, " cannot be built with the options {'position': -1} (ValueError('bef"),
    ],
    ids=str,
)
def test_options_that_cannot_be_honoured_are_refused(policy: str, options: dict[str, object], fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_load_balancer_factory(policy, options)
    assert str(caught.value).startswith(f"load balancing policy {policy!r}{fault}")


@pytest.mark.parametrize("value", [0, 0.5, 1])
def test_a_number_in_range_is_accepted(value: float) -> None:
    assert number("share", value, 0, 1) == value


@pytest.mark.parametrize(
    ("check", "value", "reason"),
    [
        (number, -0.1, "-0.1 is out of range: give a number from 0 to 1"),
        (number, 1.1, "1.1 is out of range: give a number from 0 to 1"),
        (number, float("inf"), "inf is not a number"),
        (number, float("nan"), "nan is not a number"),
        pytest.param(number, 10**400, "is not a number", id="more than a float can be"),
        (number, "1", "'1' is not a number"),
        (number, True, "True is not a number"),
        (number, [1], "[1] is not a number"),
        (whole, 1.0, "1.0 is not a whole number"),
        (whole, True, "True is not a whole number"),
        (whole, "2", "'2' is not a whole number"),
    ],
)
def test_a_value_out_of_range_is_refused(check: Callable[..., float], value: object, reason: str) -> None:
    with pytest.raises(ConfigError, match=r"^option share: ") as caught:
        check("share", value, *((0, 1) if check is number else ()))
    assert reason in str(caught.value)
