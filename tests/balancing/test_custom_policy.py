"""The example of a third-party policy, built and installed by pip."""

import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib import invalidate_caches
from pathlib import Path

import pytest

from vllm_omni_plugin.balancing import LoadBalancer, ReplicaLoad, build_load_balancer_factory
from vllm_omni_plugin.balancing.registry import installed_policies

from .fakes import with_loads, with_queues

EXAMPLE = Path(__file__).parents[2] / "examples" / "custom_policy"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package."""
    folder = tmp_path_factory.mktemp("custom_policy")
    # A build writes files next to the sources.
    source = shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info"))
    install = ["install", "--quiet", "--no-build-isolation", "--no-deps", "--no-index", "--target"]
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *install, str(folder / "site"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.fixture(autouse=True)
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(site)
    invalidate_caches()
    installed_policies.cache_clear()
    yield
    installed_policies.cache_clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "acme_policies"]:
        del sys.modules[name]


BOTH_NAMES = pytest.mark.parametrize("policy", ["warm-up", "acme_policies.warm_up:WarmUpBalancer"])


@BOTH_NAMES
def test_it_is_built_with_options_and_prefers_warm_replicas(policy: str) -> None:
    balancer = build_load_balancer_factory(policy, {"requests": 1, "weight": 3})()
    assert isinstance(balancer, LoadBalancer)
    replicas = with_loads(ReplicaLoad(requests=2), ReplicaLoad(requests=1))
    assert balancer.select({}, replicas) == 1
    balancer.ended({}, replicas[0], 1.0, 5)  # type: ignore[attr-defined]
    decision = balancer.decide({}, replicas)  # type: ignore[attr-defined]
    assert (decision.position, decision.reason) == (0, "warm")
    assert [candidate.score for candidate in decision.candidates] == [3.0, 6.0]
    balancer.replica_lost(replicas[0])  # type: ignore[attr-defined]
    assert balancer.select({}, replicas) == 1


def test_it_works_with_queue_lengths_only() -> None:
    assert build_load_balancer_factory("warm-up")().select({}, with_queues(2, 0, 1)) == 1
