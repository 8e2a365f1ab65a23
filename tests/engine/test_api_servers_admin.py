"""What an administrator tells one API server holds for the other, also for one that starts later."""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from .answers import differences
from .api_servers import ApiServers
from .lora import make_lora
from .server import MODEL, Server, complete, replicas

ADAPTER = "narrator"
SAME_PARTS = ("model_config", "cache_config", "scheduler_config", "lora_config", "structured_outputs_config")
"""Of vLLM's configuration: what does not say how many processes there are."""


@pytest.fixture
def both(api_servers: ApiServers) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    with ExitStack() as stack:
        yield stack.enter_context(api_servers.connected(0)), stack.enter_context(api_servers.connected(1))


def post(client: httpx.Client, path: str, **payload: Any) -> httpx.Response:
    return client.post(path, json=payload)


def models(client: httpx.Client) -> list[str]:
    return [card["id"] for card in client.get("/v1/models").raise_for_status().json()["data"]]


def test_all_servers_drain_when_one_is_told_to(both: tuple[httpx.Client, httpx.Client]) -> None:
    first, second = both
    body = {"model": MODEL, "prompt": "late", "max_tokens": 1}
    assert first.post("/omni/drain").status_code == httpx.codes.NO_CONTENT
    try:
        refused = [each.post("/v1/completions", json=body) for each in both]
        assert [(answer.status_code, answer.headers["retry-after"]) for answer in refused] == [(503, "5")] * 2
        assert [each.get("/health").status_code for each in both] == [503, 503]
    finally:
        assert second.post("/omni/resume").status_code == httpx.codes.NO_CONTENT
    assert [each.post("/v1/completions", json=body).status_code for each in both] == [200, 200]


def test_an_adapter_loaded_by_one_server_is_served_and_unloaded_by_the_other(
    both: tuple[httpx.Client, httpx.Client], tmp_path: Path
) -> None:
    first, second = both
    loaded = post(first, "/v1/load_lora_adapter", lora_name=ADAPTER, lora_path=str(make_lora(tmp_path / "a", seed=1)))
    assert loaded.status_code == 200, loaded.text
    assert ADAPTER in models(second)
    assert complete(first, model=ADAPTER) == complete(second, model=ADAPTER) != complete(second)
    again = post(second, "/v1/load_lora_adapter", lora_name=ADAPTER, lora_path=str(tmp_path / "a"))
    assert "has already been loaded" in again.text
    assert post(second, "/v1/unload_lora_adapter", lora_name=ADAPTER).status_code == 200
    assert ADAPTER not in models(first)
    other = make_lora(tmp_path / "b", seed=2)
    assert post(second, "/v1/load_lora_adapter", lora_name="other", lora_path=str(other)).status_code == 200
    try:
        assert complete(first, model="other") == complete(second, model="other") != complete(first)
    finally:
        assert post(first, "/v1/unload_lora_adapter", lora_name="other").status_code == 200


def test_a_replica_drained_by_one_server_gets_nothing_from_the_other(both: tuple[httpx.Client, httpx.Client]) -> None:
    first, second = both
    assert first.post("/omni/replicas/0.1/drain").status_code == 204
    try:
        assert replicas(second)["0.1"]["cordons"] == ["admin"]
        before = replicas(second)["0.1"]["assigned"]
        for _ in range(4):
            complete(second)
        assert replicas(second)["0.1"]["assigned"] == before
    finally:
        assert second.post("/omni/replicas/0.1/resume").status_code == 204
    assert replicas(first)["0.1"]["cordons"] == []


def test_both_servers_tell_the_configuration_of_one_plain_engine_and_no_secret(
    plain: Server, both: tuple[httpx.Client, httpx.Client]
) -> None:
    with plain.http(120.0) as http, ThreadPoolExecutor(3) as threads:
        # Each asks programs of its machine for seconds.
        expected, *told = threads.map(server_info, (http, *both))
        texts = [client.get("/server_info").raise_for_status().json()["vllm_config"] for client in both]
    for info in told:
        assert info["system_env"].keys() == expected["system_env"].keys()
        for part in SAME_PARTS:
            assert differences(expected["vllm_config"][part], info["vllm_config"][part], part) == []
    first, second = (info["vllm_config"]["additional_config"]["vllm_omni_plugin"] for info in told)
    assert first == second
    secret = Path(first["secret_file"]).read_text().strip()
    assert secret
    assert [text for text in (*texts, *map(str, told)) if secret in text] == []


def server_info(client: httpx.Client) -> Any:
    return client.get("/server_info", params={"config_format": "json"}).raise_for_status().json()


@pytest.mark.long
def test_a_server_that_starts_again_knows_what_the_other_was_told(api_servers: ApiServers, tmp_path: Path) -> None:
    with api_servers.connected(0) as first:
        path = str(make_lora(tmp_path / "a", seed=1))
        assert post(first, "/v1/load_lora_adapter", lora_name=ADAPTER, lora_path=path).status_code == 200
        assert first.post("/omni/replicas/0.1/drain").status_code == 204
        expected = complete(first, model=ADAPTER)
        before = api_servers.pids[1]
        os.kill(before, signal.SIGKILL)
        api_servers.wait_for_restart(1, before)
        try:
            with api_servers.connected(1) as second:
                assert ADAPTER in models(second)
                assert replicas(second)["0.1"]["cordons"] == ["admin"]
                assert complete(second, model=ADAPTER) == expected
                assert second.post("/omni/replicas/0.1/resume").status_code == 204
                assert post(second, "/v1/unload_lora_adapter", lora_name=ADAPTER).status_code == 200
            assert ADAPTER not in models(first)
            assert replicas(first)["0.1"]["cordons"] == []
        finally:
            first.post("/omni/replicas/0.1/resume")
            post(first, "/v1/unload_lora_adapter", lora_name=ADAPTER)
