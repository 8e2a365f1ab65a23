"""The fleet in front of which vLLM's Rust front end stands. Collected only where vLLM has that front end."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from vllm_omni_plugin.vllm_api.versions.differences import RUST_FRONT_END

if RUST_FRONT_END.applies:
    from tests.contract.stage_models import model

    from .played import READY, PlayedFrontEnd, RustFleet

collect_ignore_glob = [] if RUST_FRONT_END.applies else ["*.py"]


@pytest.fixture(autouse=True)
def rust_front_end_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")


@pytest.fixture
def sockets(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of all ipc sockets that are made."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(short_path))
    return short_path


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def fleet() -> AsyncIterator["RustFleet"]:
    async with RustFleet(replicas=2) as fleet:
        yield fleet


@pytest.fixture
async def front_end(fleet: "RustFleet", sockets: Path) -> AsyncIterator["PlayedFrontEnd"]:
    """It is connected to the fleet."""
    async with PlayedFrontEnd(sockets) as front_end:
        fleet.link.connect(front_end.addresses, READY)
        assert await front_end.greeted() == READY
        yield front_end
