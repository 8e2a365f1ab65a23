"""Policies by name: built-in, installed, and given as a class."""

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from vllm_omni_plugin.balancing import (
    CostAwareBalancer,
    KvAwareBalancer,
    LeastQueueLengthBalancer,
    LeastTokensBalancer,
    LoadBalancingPolicy,
    PowerOfTwoBalancer,
    PrefixBalancer,
    RandomBalancer,
    RoundRobinBalancer,
    SessionBalancer,
    build_load_balancer_factory,
    known_policies,
)
from vllm_omni_plugin.errors import ConfigError

from .fakes import with_queues

PLUGIN = """
class Last:
    def select(self, task, replicas):
        return len(replicas) - 1

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

def last():
    return Last()
"""
BUILT_IN = [
    "random",
    "round-robin",
    "least-queue-length",
    "power-of-two",
    "least-tokens",
    "session",
    "prefix",
    "kv-aware",
    "cost-aware",
]

Install = Callable[..., None]


@pytest.fixture
def plugin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on `sys.path` with the importable module `acme_policies`."""
    (tmp_path / "acme_policies.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("acme_policies", None)


@pytest.fixture
def install(plugin_dir: Path) -> Install:
    """Install a distribution whose entry points, in our group, are the given ones."""

    def write_metadata(distribution: str, **policies: str) -> None:
        folder = plugin_dir / f"{distribution}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{name.replace('_', '-')} = {value}" for name, value in policies.items()]
        (folder / "entry_points.txt").write_text("\n".join(["[vllm_omni_plugin.lb_policies]", *lines, ""]))
        importlib.invalidate_caches()

    return write_metadata


@pytest.mark.parametrize(
    ("policy", "balancer"),
    [
        (LoadBalancingPolicy.RANDOM, RandomBalancer),
        (LoadBalancingPolicy.ROUND_ROBIN, RoundRobinBalancer),
        (LoadBalancingPolicy.LEAST_QUEUE_LENGTH, LeastQueueLengthBalancer),
        (LoadBalancingPolicy.POWER_OF_TWO, PowerOfTwoBalancer),
        (LoadBalancingPolicy.LEAST_TOKENS, LeastTokensBalancer),
        (LoadBalancingPolicy.SESSION, SessionBalancer),
        (LoadBalancingPolicy.PREFIX, PrefixBalancer),
        (LoadBalancingPolicy.KV_AWARE, KvAwareBalancer),
        (LoadBalancingPolicy.COST_AWARE, CostAwareBalancer),
    ],
)
def test_a_built_in_policy_is_found_by_member_and_by_name(policy: LoadBalancingPolicy, balancer: type) -> None:
    assert type(build_load_balancer_factory(policy)()) is balancer
    assert type(build_load_balancer_factory(policy.value)()) is balancer


def test_every_built_in_policy_can_be_built() -> None:
    assert all(build_load_balancer_factory(policy)().select({}, with_queues(0)) == 0 for policy in LoadBalancingPolicy)


def test_a_factory_builds_balancers_that_share_no_state() -> None:
    build, replicas = build_load_balancer_factory("round-robin"), with_queues(0, 0)
    left, right = build(), build()
    assert [left.select({}, replicas), right.select({}, replicas)] == [0, 0]


def test_known_policies_are_the_built_in_then_the_installed(install: Install) -> None:
    assert known_policies() == BUILT_IN
    install("acme", zigzag="acme_policies:Last", acme_last="acme_policies:Last")
    assert known_policies() == [*BUILT_IN, "acme-last", "zigzag"]


def test_an_installed_policy_is_found_by_name(install: Install) -> None:
    install("acme", acme_last="acme_policies:Last")
    assert build_load_balancer_factory("acme-last")().select({}, with_queues(0, 0, 0)) == 2


@pytest.mark.usefixtures("plugin_dir")
def test_a_class_is_found_by_module_and_name() -> None:
    assert build_load_balancer_factory("acme_policies:Last")().select({}, with_queues(0, 0, 0)) == 2


def test_an_unknown_name_lists_the_known_and_suggests_the_closest(install: Install) -> None:
    install("acme", acme_last="acme_policies:Last")
    with pytest.raises(ConfigError) as caught:
        build_load_balancer_factory("round_robbin")
    assert str(caught.value) == (
        "unknown load balancing policy 'round_robbin' (did you mean 'round-robin'?): "
        f"use one of {', '.join(BUILT_IN)}, acme-last, or package.module:Class"
    )


def test_a_name_like_no_other_gets_no_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"^unknown load balancing policy 'xyz': use one of "):
        build_load_balancer_factory("xyz")


BAD_CLASSES = [
    pytest.param("acme_nowhere:Last", r"cannot be imported \(ModuleNotFoundError", id="no such module"),
    pytest.param("acme_policies:First", r"cannot be imported \(AttributeError", id="no such class"),
    pytest.param("acme_policies:last", "is not a class", id="function"),
    pytest.param("acme_policies:Deaf", r"has no method select\(task, replicas\)", id="no select"),
    pytest.param("acme_policies:Numb", r"has no method select\(task, replicas\)", id="select is no method"),
    pytest.param("acme_policies:Needy", "cannot be built without arguments", id="needs an argument"),
    pytest.param("acme_policies:Failing", r"cannot be built without arguments \(OSError", id="constructor raises"),
    pytest.param(
        "vllm_omni_plugin.balancing:LoadBalancer", "cannot be built without arguments", id="the contract itself"
    ),
]


@pytest.mark.usefixtures("plugin_dir")
@pytest.mark.parametrize(
    ("name", "reason"),
    [
        *BAD_CLASSES,
        pytest.param("acme_policies:", "is not a class", id="module only"),
        pytest.param(":Last", r"cannot be imported \(ValueError", id="class only"),
    ],
)
def test_a_class_that_is_no_policy_is_refused_when_the_factory_is_built(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"^load balancing policy '{name}' {reason}"):
        build_load_balancer_factory(name)


@pytest.mark.parametrize(("value", "reason"), BAD_CLASSES)
def test_a_broken_plugin_breaks_only_when_it_is_asked_for(install: Install, value: str, reason: str) -> None:
    install("acme", broken=value, acme_last="acme_policies:Last")
    assert known_policies() == [*BUILT_IN, "acme-last", "broken"]
    build_load_balancer_factory("random")
    build_load_balancer_factory("acme-last")
    with pytest.raises(ConfigError, match=rf"^load balancing policy 'broken' \({value}, installed by acme\) {reason}"):
        build_load_balancer_factory("broken")


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
