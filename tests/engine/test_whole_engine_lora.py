"""Adapters loaded at run time are on every replica, also on one that starts later."""

import asyncio
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from .both_replicas import answers_of_both
from .lora import make_lora
from .server import IN_FLIGHT, MODEL, RUST, Server, until

ADAPTER = "storyteller"
RESTART_S = 120.0

pytestmark = pytest.mark.both_front_ends


@pytest.fixture
def adapter(fleet: Server, tmp_path: Path) -> Iterator[str]:
    """An adapter that is loaded while the test runs."""
    response = load(fleet, ADAPTER, make_lora(tmp_path / "lora", seed=1))
    assert response.status_code == 200, response.text
    yield ADAPTER
    assert post(fleet, "/v1/unload_lora_adapter", {"lora_name": ADAPTER}).status_code == 200


def post(server: Server, path: str, payload: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + path, json=payload, timeout=60.0)


def load(server: Server, name: str, path: Path) -> httpx.Response:
    return post(server, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})


def body(model: str) -> dict[str, Any]:
    return {"model": model, "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


def answers(server: Server, model: str) -> set[str]:
    """The different answers of the two replicas."""
    return set(answers_of_both(server, partial(server.complete, model=model)))


@pytest.mark.both_front_ends(newest=True)
def test_an_adapter_answers_the_same_from_every_replica_and_once_unloaded_its_name_is_free_again(
    fleet: Server, tmp_path: Path
) -> None:
    told = [answers(fleet, MODEL)]
    for seed in (2, 3):
        assert load(fleet, "brief", make_lora(tmp_path / str(seed), seed)).status_code == 200
        told.append(answers(fleet, "brief"))
        assert post(fleet, "/v1/unload_lora_adapter", {"lora_name": "brief"}).status_code == 200
        assert post(fleet, "/v1/completions", body("brief")).status_code == 404
    assert [len(texts) for texts in told] == [1, 1, 1]
    assert len(set.union(*told)) == 3


def test_an_adapter_that_cannot_be_loaded_is_one_error_and_costs_no_replica(
    fleet: Server, tmp_path: Path, front_end: str
) -> None:
    engines = fleet.engine_pids()
    missing = load(fleet, "missing", tmp_path / "missing")
    # vLLM's Rust front end looks for the folder itself.
    status, why = (400, "must exist") if front_end == RUST else (404, "missing")
    assert missing.status_code == status
    assert why in missing.json()["error"]["message"]
    too_large = load(fleet, "large", make_lora(tmp_path / "large", seed=4, rank=64))
    assert too_large.status_code >= 400
    assert "rank" in too_large.json()["error"]["message"]
    assert len(answers(fleet, MODEL)) == 1
    assert (fleet.replicas_up(), fleet.engine_pids()) == (2, engines)


@pytest.mark.long
async def test_a_replica_that_starts_again_knows_the_adapter_and_the_pause(fleet: Server, adapter: str) -> None:
    (expected,) = await asyncio.to_thread(answers, fleet, adapter)
    async with httpx.AsyncClient(base_url=fleet.url, timeout=60.0) as client:
        await client.post("/pause", params={"mode": "keep"})
        try:
            await asyncio.to_thread(replace_engine, fleet, 0)
            assert (await client.get("/is_paused")).json() == {"is_paused": True}
            requests = [asyncio.create_task(client.post("/v1/completions", json=body(adapter))) for _ in range(4)]
            await asyncio.to_thread(
                until, lambda: list(fleet.by_replica(IN_FLIGHT).values()) == [2, 2], "both replicas hold half"
            )
            assert not any(request.done() for request in requests)
        finally:
            await client.post("/resume")
        texts = [(await request).json()["choices"][0]["text"] for request in requests]
    assert texts == [expected] * 4


def replace_engine(fleet: Server, replica: int) -> None:
    """Kill the engine of a replica and wait until another one serves in its place."""
    victim = fleet.engine_pids()[replica]
    os.kill(victim, signal.SIGKILL)
    until(lambda: fleet.engine_pids()[replica] != victim, f"replica {replica} serves again", RESTART_S)
    until(lambda: fleet.replicas_up() == 2, "both replicas serve")
