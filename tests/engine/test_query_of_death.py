"""A request that its engines die of, beside others, with real engines that sleep in place of a model."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from .load import Load
from .server import FRONT_ENDS, MODEL, RUST, START_S, Server, until

REPLICAS = 3
STREAMS = 6
LONG, SHORT = 500, 20
"""Tokens of 10 ms: of streams that run meanwhile, and of a request that comes afterwards."""
FAILED = "vllm_omni_fleet:requests_failed_total"
DEADLY_PROMPT = [13] * 13
CONFIG = {
    "sleeping_executor": {"step_s": 0.01, "prefill_token_s": 0.01, "sequence_s": 0},
    "deadly_prompt": DEADLY_PROMPT,
}


@pytest.fixture
def server(make_room: None, tiny_model: Path, logs: Path, front_end: str) -> Iterator[Server]:
    """Three replicas, from which a request may move once."""
    flags = ("--omni-dp-size-local", str(REPLICAS), "--omni-lb-policy", "round-robin", "--omni-migration-limit", "1")
    engines = ("--distributed-executor-backend", "deadly_executor.DeadlyExecutor")
    config = ("--additional-config", json.dumps(CONFIG))
    with Server(
        tiny_model, logs / f"deadly-{front_end}.log", *flags, *engines, *config, **FRONT_ENDS[front_end]
    ) as server:
        until(lambda: server.replicas_up() == REPLICAS, "all replicas serve", START_S)
        yield server


@pytest.mark.both_front_ends
@pytest.mark.long
def test_a_request_that_engines_die_of_gets_no_third_and_ends_alone(server: Server, front_end: str) -> None:
    engines = [psutil.Process(pid) for pid in server.engine_pids().values()]
    with Load(server) as load:
        streams = [load.send(LONG, stream=True) for _ in range(STREAMS)]
        assert all(stream.started.wait(START_S) for stream in streams)
        with server.http(START_S) as http:
            response = http.post("/v1/completions", json={"model": MODEL, "prompt": DEADLY_PROMPT, "max_tokens": 4})
        assert response.status_code == httpx.codes.INTERNAL_SERVER_ERROR
        why = server.log.read_text() if front_end == RUST else response.json()["error"]["message"]
        assert why.count("SIGILL") >= 2
        assert "gets no third replica" in why
        load.wait()
    # A stream that was beside it both times has moved twice, where one move is allowed.
    assert [stream for stream in streams if not stream.finished_whole] == []
    assert {dict(labels)["reason"]: count for labels, count in server.metrics(FAILED).items()} == {
        "query_of_death": 1,
        "replica_lost": 0,
        "no_replica": 0,
    }
    assert sum(engine.is_running() for engine in engines) == REPLICAS - 2
    with Load(server) as load:
        answer = load.send(SHORT, stream=False)
    assert answer.finished_whole
