"""Imports vLLM before any test does: importing it warns, and warnings are errors here. And a client without engines."""

import signal
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vllm.v1.engine.async_llm
    import vllm.v1.worker.gpu_worker  # noqa: F401
    from vllm.model_executor.models import registry

from tests.fakes.idle_fleet import IdleFleet
from vllm_omni_plugin.balancing import RandomBalancer
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.orchestrator import Orchestrator, StagePool
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadRules
from vllm_omni_plugin.replicas.replica_server.node import SIGNALS
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi


@pytest.fixture(scope="session", autouse=True)
def models_are_looked_at_here() -> Iterator[None]:
    """vLLM imports the class of a model that is new to this machine in a process of its own: eight seconds each."""

    def here(look: Callable[[], object]) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return look()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_run_in_subprocess", here)
        yield


@pytest.fixture(autouse=True)
def signals_end_the_process_afterwards() -> Iterator[None]:
    """A command that runs here ignores signals at its end, and processes that later tests start would do so, too."""
    yield
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_DFL if signum != signal.SIGINT else signal.default_int_handler)


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The flags of a server with a certificate."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = str(folder / "key"), str(folder / "certificate")
    subject = ["-subj", "/CN=localhost", "-days", "1", "-keyout", key, "-out", certificate]
    subprocess.run(["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", *subject], check=True, timeout=60)
    return ["--ssl-keyfile", key, "--ssl-certfile", certificate]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
def orchestrator() -> Orchestrator:
    """One that does not run, and has no replica."""
    return Orchestrator([StagePool(0, RandomBalancer())], [EngineApi()], HeadRules(0), time.monotonic)


@pytest.fixture
def fleet(orchestrator: Orchestrator) -> IdleFleet:
    """One that runs nothing."""
    return IdleFleet(orchestrator)


@pytest.fixture
def client(fleet: IdleFleet) -> Iterator[FleetClient]:
    """AsyncLLM's client of that fleet."""
    client = FleetClient(fleet, SimpleNamespace(), [])
    yield client
    client.shutdown()
