"""Models and servers that the engine tests share."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from .server import Server

_TINY_MODEL = Path(__file__).parents[2] / "examples" / "cpu" / "tiny_model.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Everything in this folder needs an engine."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.engine)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of `make demo`."""
    spec = importlib.util.spec_from_file_location("tiny_model", _TINY_MODEL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    directory: Path = module.make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")
    return directory


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where servers write."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def fleet(tiny_model: Path, logs: Path) -> Iterator[Server]:
    """A head with two local replicas, for tests that leave it as they found it."""
    args = ("--omni-lb-policy", "least-queue-length", "--omni-dp-size-local", "2", *FEATURES)
    with Server(tiny_model, logs / "fleet.log", *args, **TWO_ENGINES) as server:
        yield server


@pytest.fixture(scope="session")
def plain(tiny_model: Path, logs: Path) -> Iterator[Server]:
    """vLLM without any flag of ours, with the plugin installed."""
    with Server(tiny_model, logs / "plain.log", *FEATURES) as server:
        yield server


FEATURES = (
    "--enable-auto-tool-choice",
    "--tool-call-parser",
    "hermes",
    "--enable-prompt-tokens-details",
)
TWO_ENGINES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
