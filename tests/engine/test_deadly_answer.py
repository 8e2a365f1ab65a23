"""A request that its engines die of in the middle of its answer, beside others, with real engines and a model."""

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from .load import Load, Outcome
from .server import FAILED, FRONT_ENDS, RUST, START_S, Server, until
from .startup.deadly_logits import DEADLY_TOKEN, MARKER

REPLICAS = 3
STREAMS = 9
LONG = 700
"""Tokens: a stream is still running when the second engine dies."""


def send(load: Load, number: int) -> Outcome:
    """Ask for a stream that is the same every time."""
    return load.send(LONG, stream=True, prompt=f"story {number}", temperature=0)


@pytest.fixture
def server(make_room: None, tiny_model: Path, logs: Path, front_end: str) -> Iterator[Server]:
    """Three replicas."""
    flags = ("--omni-dp-size-local", str(REPLICAS), "--omni-lb-policy", "round-robin")
    log, deadly = logs / f"logits-{front_end}.log", ("--logits-processors", "deadly_logits:DeadlyLogits")
    with Server(tiny_model, log, *flags, *deadly, **FRONT_ENDS[front_end]) as server:
        until(lambda: server.replicas_up() == REPLICAS, "all replicas serve", START_S)
        yield server


@pytest.mark.both_front_ends
@pytest.mark.long
def test_a_request_that_engines_die_of_in_its_answer_kills_two_and_its_neighbours_streams_are_whole(
    server: Server, front_end: str
) -> None:
    with Load(server) as load:
        undisturbed = [send(load, number) for number in range(STREAMS)]
        load.wait()
    assert all(stream.finished_whole for stream in undisturbed)
    engines = [psutil.Process(pid) for pid in server.engine_pids().values()]
    with Load(server) as load:
        streams = [send(load, number) for number in range(STREAMS)]
        assert all(stream.started.wait(START_S) for stream in streams)
        deadly = load.send(2 * DEADLY_TOKEN, stream=True, prompt=MARKER)
        load.wait()
    # The marker's client has seen the beginning of an answer, and one error.
    assert deadly.started.is_set()
    [error] = deadly.errors
    if front_end == RUST:
        assert error == "Internal server error"
    else:
        assert "engines died while they ran this request: replica " in error
        assert error.endswith("so it gets no third replica.")
        # One of the two may have died again, if others were beside it both times.
        assert error.count("it exited with code 1") in (2, 3)
    assert [stream for stream in streams if not stream.finished_whole] == []
    assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]
    assert {dict(labels)["reason"]: count for labels, count in server.metrics(FAILED).items()} == {
        "query_of_death": 1,
        "replica_lost": 0,
        "no_replica": 0,
    }
    assert sum(engine.is_running() for engine in engines) == REPLICAS - 2
    [line] = [line for line in server.log.read_text().splitlines() if "gets no third replica: replica 0." in line]
    assert "died under request cmpl-" in line
    assert line.count("others in flight") in (2, 3)
