"""Two heads with the same replicas: alike to clients, each aware of the other's requests, and either may die."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from .load import Load
from .nodes import NodeFleet
from .server import FRONT_ENDS, MODEL, RUST, START_S, Server, until
from .suspended import standing_still

TOKENS = 500
SHUTDOWN_S = 60
PROMPT = "the second head"

pytestmark = pytest.mark.both_front_ends
SESSION = ("vllm_omni_fleet:coordinator_connected", "vllm_omni_fleet:heads")


@pytest.fixture(scope="module")
def logs_of_joined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("joined")


@pytest.fixture(scope="module")
def joined_heads(front_end: str) -> Iterator[dict[str, Server]]:
    heads: dict[str, Server] = {}
    yield heads
    for head in heads.values():
        head.stop()


@pytest.fixture
def second(
    nodes: NodeFleet, tiny_model: Path, logs_of_joined: Path, joined_heads: dict[str, Server], front_end: str
) -> Server:
    """A head that has joined the fleet of `nodes`, another one after a test that ended it."""
    if "second" not in joined_heads or joined_heads["second"].process.poll() is not None:
        log = logs_of_joined / f"second-{front_end}.log"
        flags = ("--omni-join", "--enable-lora")
        joined_heads["second"] = Server(tiny_model, log, *nodes.join, *flags, **FRONT_ENDS[front_end]).__enter__()
    head = joined_heads["second"]
    until(lambda: head.replicas_up() == 2, "both replicas take requests of the second head", START_S)
    return head


def coordinator_and_heads(head: Server) -> list[float]:
    return [value for name in SESSION for value in head.metrics(name).values()]


@pytest.mark.parametrize("killed", [pytest.param("first", marks=pytest.mark.long), "second"])
def test_the_streams_of_one_go_on_when_the_other_is_killed(nodes: NodeFleet, second: Server, killed: str) -> None:
    dying, living = (nodes.head, second) if killed == "first" else (second, nodes.head)
    expected = living.complete(prompt=PROMPT, tokens=TOKENS)
    until(lambda: coordinator_and_heads(living) == [1, 2], "it hears of the other")
    with ThreadPoolExecutor(2) as threads, Load(dying) as load:
        lost = [load.send(TOKENS, stream=True) for _ in range(2)]
        kept = [threads.submit(living.complete, prompt=PROMPT, tokens=TOKENS) for _ in range(2)]
        assert all(outcome.started.wait(60) for outcome in lost)
        dying.kill()
        assert [answer.result() for answer in kept] == [expected, expected]
    until(
        lambda: sum(row["total_in_flight"] for row in living.replicas().values()) == 0,
        "nothing of the dead one is counted",
    )
    until(lambda: coordinator_and_heads(living) == [killed == "second", 1], "it says that it is alone")
    assert living.complete(prompt=PROMPT, tokens=TOKENS) == expected
    if killed == "first":
        nodes.restart_head()
        nodes.head.wait()
        nodes.wait_for_replicas(2)
        assert nodes.head.complete(prompt=PROMPT, tokens=TOKENS) == expected


def test_a_head_that_is_drained_and_told_to_end_finishes_its_streams(
    nodes: NodeFleet, second: Server, front_end: str
) -> None:
    expected = nodes.head.complete(prompt=PROMPT, tokens=TOKENS)
    with Load(second) as load, second.operator() as http:
        streams = [load.send(TOKENS, stream=True, prompt=PROMPT, temperature=0) for _ in range(3)]
        assert all(stream.started.wait(60) for stream in streams)
        with standing_still(node.engine.pid for node in nodes.nodes):
            assert http.post("/omni/drain").status_code == httpx.codes.NO_CONTENT
            late = http.post("/v1/completions", json={"model": MODEL, "prompt": PROMPT})
            assert (late.status_code, second.health()) == (503, 503)
            assert late.headers.get("retry-after") == (None if front_end == RUST else "5")
            assert late.json()["error"]["code"] == httpx.codes.SERVICE_UNAVAILABLE
            assert http.get("/omni/events").json()["events"][-1]["kind"] == "drain"
            assert nodes.head.health() == httpx.codes.OK, "the other one serves on"
        # Without --shutdown-timeout, which would be 0 with vLLM alone.
        second.tell_to_end()
        assert second.process.wait(SHUTDOWN_S) == 0
    assert [stream.text for stream in streams] == [expected] * 3
    assert all(stream.finished_whole for stream in streams)
