"""The admission file is reloaded over HTTP and at a signal."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from tests.admin.asgi import app_of, client_of
from tests.fakes.conditions import eventually
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admin.operator_actions import AdmissionFile
from vllm_omni_plugin.admission import AdmissionConfig, RequestTerms, Ticket, load_admission

GOOD = "max_waiting_requests: 5\n"


def write(path: Path, text: str) -> None:
    path.write_text(text)


@pytest.fixture
async def fleet() -> AsyncIterator[FakeFleet]:
    async with FakeFleet(replicas=1, plan=AdmissionConfig()) as fleet:
        yield fleet


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "admission.yaml"
    write(path, GOOD)
    return path


@pytest.fixture
def reloads() -> list[str]:
    return []


@pytest.fixture
async def file(fleet: FakeFleet, path: Path, reloads: list[str]) -> AdmissionFile:
    return AdmissionFile(str(path), fleet.orchestrator, lambda: reloads.append("others"))


@pytest.fixture
def app(fleet: FakeFleet) -> FastAPI:
    return app_of(fleet)


@pytest.fixture
async def client(app: FastAPI, file: AdmissionFile) -> AsyncIterator[httpx.AsyncClient]:
    app.state.omni_admission_file = file
    async with client_of(app) as client:
        yield client


async def test_a_valid_file_is_used_at_once_and_the_response_has_the_changes(
    fleet: FakeFleet, client: httpx.AsyncClient, path: Path, reloads: list[str]
) -> None:
    answer = await client.post("/omni/admission")
    assert (answer.status_code, answer.json()) == (200, {"changes": ["max_waiting_requests: none -> 5"]})
    write(path, "max_waiting_requests: 7\nmax_wait: 2\n")
    answer = await client.post("/omni/admission")
    assert answer.json() == {"changes": ["max_wait: none -> 2.0", "max_waiting_requests: 5 -> 7"]}
    assert fleet.orchestrator.admission.config == load_admission(path)
    assert reloads == ["others", "others"]


async def test_an_invalid_file_keeps_the_old_config_and_the_response_has_the_error(
    fleet: FakeFleet, client: httpx.AsyncClient, path: Path, reloads: list[str]
) -> None:
    await client.post("/omni/admission")
    admission = fleet.orchestrator.admission
    ticket = admission.new_ticket(RequestTerms("a"), 0, 10, 0.0)
    assert isinstance(ticket, Ticket)
    assert admission.enqueue(ticket, 0.0) == []
    write(path, "max_waiting_requests: 7\n\nmax_wiat: 2\n")
    answer = await client.post("/omni/admission")
    assert answer.status_code == 400
    assert f"{path}:3: max_wiat: unknown key (did you mean 'max_wait'?)" in answer.text
    assert admission.config.max_waiting_requests == 5
    assert admission.backlog == (1, 10)
    assert reloads == ["others"]


async def test_a_server_without_a_file_answers_404(app: FastAPI) -> None:
    async with client_of(app) as client:
        answer = await client.post("/omni/admission")
    assert answer.status_code == 404
    assert "without --omni-admission" in answer.text


async def test_a_signal_reloads_the_file_of_this_server_only(
    fleet: FakeFleet, file: AdmissionFile, reloads: list[str]
) -> None:
    file.on_signal()
    await eventually(lambda: fleet.orchestrator.admission.config.max_waiting_requests == 5)
    assert reloads == []


async def test_a_signal_with_an_invalid_file_logs_the_error(
    fleet: FakeFleet, file: AdmissionFile, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(
        "vllm_omni_plugin.admin.operator_actions.logger.error", lambda text, *values: logged.append(text % values)
    )
    write(path, "max_wait: soon")
    file.on_signal()
    await eventually(lambda: bool(logged))
    assert logged == [
        "The admission file has an error, and the previous config stays in use: "
        f'{path}:1: max_wait: must be a number, not "soon"'
    ]
    assert fleet.orchestrator.admission.config.max_wait is None
