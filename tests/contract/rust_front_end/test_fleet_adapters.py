"""Adapters that are loaded at run time are the fleet's: the next front end has them, and the running one follows."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import msgpack

from tests.fakes.conditions import eventually
from vllm_omni_plugin.orchestrator.fleet_state.server_updates import EngineStateUpdate
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter

from .head import MODEL, Head, answers_itself, is_running, started_head
from .played import PATIENCE_S, READY, RustFleet

WITH_ADAPTERS = msgpack.encode(msgpack.decode(READY) | {"supports_lora": True, "max_loras": 4})
Start = Callable[..., AbstractAsyncContextManager[Head]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """That of an adapter, by a link, which the front end resolves."""
    (tmp_path / "files").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "files")
    return tmp_path / "link"


@pytest.fixture(autouse=True)
def allowed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    monkeypatch.setenv("VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES", str(folder.parent))


@pytest.fixture
def start(tiny_model: Path, sockets: Path) -> Start:
    @asynccontextmanager
    async def start(*arguments: str) -> AsyncIterator[Head]:
        fleet = RustFleet(replicas=2)
        answers_itself(fleet)
        fleet.answer_with(lambda link, call_id, method, args: link.answer(call_id, True))
        async with started_head(tiny_model, *arguments, fleet=fleet, ready_response=WITH_ADAPTERS) as head:
            # A connection of before would end with the front end.
            head.client.headers["Connection"] = "close"
            yield head

    return start


@pytest.fixture
async def head(start: Start) -> AsyncIterator[Head]:
    async with start() as head:
        yield head


async def post(head: Head, action: str, **body: Any) -> int:
    return (await head.client.post(f"/v1/{action}_lora_adapter", json=body)).status_code


async def named(head: Head) -> set[str]:
    """The models that the front end knows."""
    return {model["id"] for model in (await head.client.get("/v1/models")).json()["data"]}


async def replace(head: Head) -> None:
    """Kill the front end; the next one answers afterwards."""
    killed = head.serving
    os.kill(killed, signal.SIGKILL)
    await eventually(lambda: not is_running(killed), "its end")
    assert await head.is_healthy()


async def elsewhere(head: Head, method: str, argument: Any) -> None:
    """Another head makes a call, and this one follows it."""
    applied: Future[None] = Future()
    loaded = (argument,) if method == "add_lora" else ()
    await head.fleet.call(method, argument)
    head.fleet.link.give(EngineStateUpdate(loaded, () if loaded else (argument,), None, applied))
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.wrap_future(applied)


async def test_the_next_front_end_has_the_adapters_of_the_last_one(head: Head, folder: Path) -> None:
    assert await post(head, "load", lora_name="fr", lora_path=str(folder)) == 200
    # At once, and when the standby has been started again.
    await replace(head)
    assert (await head.ask(model="fr")).status_code == 200
    await replace(head)
    assert (await head.ask(model="fr")).status_code == 200
    # The engines have loaded it once.
    assert [method for _, method, _ in head.fleet.links[0].calls] == ["add_lora"]
    assert await post(head, "unload", lora_name="fr") == 200
    await replace(head)
    assert (await head.ask(model="fr")).status_code == 404


async def test_what_another_head_loads_and_unloads_the_running_front_end_does_too(head: Head, folder: Path) -> None:
    before = head.serving
    adapter = Adapter("fr", 77, str(folder))
    await elsewhere(head, "add_lora", adapter)
    assert await named(head) == {MODEL, "fr"}
    assert (await head.ask(model="fr")).status_code == 200
    [request] = [request for link in head.fleet.links.values() for request in link.requests.values()]
    assert (request.lora_request.lora_int_id, request.lora_request.lora_path) == (77, str(folder))
    await elsewhere(head, "forget_lora", 77)
    assert await named(head) == {MODEL}
    assert head.serving == before
    assert [method for _, method, _ in head.fleet.links[0].calls] == ["add_lora"]


async def test_an_adapter_of_the_command_line_that_was_unloaded_stays_so(start: Start, folder: Path) -> None:
    async with start("--lora-modules", f"fr={folder}", f"de={folder}") as head:
        await replace(head)
        assert await named(head) == {MODEL, "fr", "de"}
        assert await post(head, "unload", lora_name="fr") == 200
        await replace(head)
        assert await named(head) == {MODEL, "de"}


async def test_an_adapter_with_the_name_of_the_model_does_not_end_the_front_end(head: Head, folder: Path) -> None:
    await elsewhere(head, "add_lora", Adapter(MODEL, 77, str(folder)))
    await replace(head)
    assert await named(head) == {MODEL}


async def test_a_front_end_that_may_not_load_it_says_so_and_the_next_one_has_it(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING")
    async with start("--api-key", "secret") as head:
        head.client.headers["Authorization"] = "Bearer secret"
        await elsewhere(head, "add_lora", Adapter("fr", 77, str(folder)))
        assert "404" in caplog.text
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in caplog.text
        assert (await head.ask(model="fr")).status_code == 404
        await replace(head)
        assert (await head.ask(model="fr")).status_code == 200
