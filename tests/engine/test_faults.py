"""Engines that are killed: what their requests see, what everybody else sees, and how they come back."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import Event, Thread

import pytest

from .conftest import REPLICA_WAIT_S, RUNNING_EACH
from .load import Load, Outcome
from .server import FAILED, IN_FLIGHT, MOVES, RUST, START_S, Server, until
from .suspended import Engine, engines_of

WAITING_EACH = 4
"""Requests that wait in an engine behind those that it runs, with nothing delivered."""
LONG, SHORT = 1200, 20
"""Tokens: of a request that is still running when an engine dies, and of one that waits behind such requests."""

RUNNING = "vllm:num_requests_running"


@pytest.fixture
def victim(vision_fleet: Server) -> Server:
    """A fleet of two that both serve, whatever its model could see."""
    return vision_fleet


class HealthWatch:
    """Asks for /health all the time while it is open, and keeps every status that came."""

    def __init__(self, server: Server) -> None:
        self.seen: set[int | None] = set()
        self._server = server
        self._over = Event()
        self._thread = Thread(target=self._watch)

    def __enter__(self) -> "HealthWatch":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.1):
            self.seen.add(self._server.health())


@dataclass
class Work:
    """What keeps one engine busy: long requests, of which the last is a stream, and short ones behind them."""

    long: list[Outcome] = field(default_factory=list)
    short: list[Outcome] = field(default_factory=list)

    @property
    def requests(self) -> list[Outcome]:
        return [*self.long, *self.short]


@contextmanager
def busy_and_suspended(server: Server, load: Load) -> Iterator[tuple[dict[str, Work], dict[str, Engine]]]:
    """Both engines stand still in the middle of their long requests, none of their short ones begun.

    An engine admits requests in order, so once the last long one has delivered output, so have those before it. What is
    not killed meanwhile goes on afterwards.
    """
    engines = engines_of(server)
    for engine in engines.values():
        engine.suspend()
    try:
        work = send_work(server, load)
        for replica, engine in engines.items():
            stream = work[replica].long[-1]
            until(partial(begins, stream, engine), f"replica {replica} answers")
        yield work, engines
    finally:
        for engine in engines.values():
            engine.resume()


def begins(stream: Outcome, engine: Engine) -> bool:
    """Let a suspended engine run for a moment; returns whether the stream's client has seen output since."""
    engine.run_for_a_moment()
    return stream.started.wait(2.0)


def counts_change(server: Server, before: dict[str, float]) -> bool:
    return server.by_replica(IN_FLIGHT) != before


def send_work(server: Server, load: Load) -> dict[str, Work]:
    """Send the long requests one by one, streams last, then the short ones; returns who got what."""
    work = {replica: Work() for replica in server.by_replica(IN_FLIGHT)}
    for sent in range(2 * (RUNNING_EACH + WAITING_EACH)):
        before = server.by_replica(IN_FLIGHT)
        is_long = sent < 2 * RUNNING_EACH
        outcome = load.send(LONG if is_long else SHORT, stream=sent % 4 >= 2)
        until(partial(counts_change, server, before), "the request is assigned")
        (replica,) = (replica for replica, count in server.by_replica(IN_FLIGHT).items() if count > before[replica])
        (work[replica].long if is_long else work[replica].short).append(outcome)
    return work


@pytest.mark.both_front_ends
def test_a_killed_engine_costs_no_answer(victim: Server) -> None:
    moves, failed = victim.total(MOVES), victim.total(FAILED)
    with Load(victim) as load, HealthWatch(victim) as health:
        with busy_and_suspended(victim, load) as (work, engines):
            engines["1"].core.kill()
        until(lambda: victim.replicas_up() == 1, "the loss is noticed")
        until(lambda: victim.by_engine(RUNNING)["1"] == 0, "vLLM's gauge of the dead engine is zero")
        assert victim.by_replica(IN_FLIGHT)["1"] == 0
        load.wait()
    ended = [outcome for replica in work.values() for outcome in replica.requests]
    assert [outcome for outcome in ended if not outcome.finished_whole] == []
    assert victim.total(MOVES) - moves == RUNNING_EACH + WAITING_EACH
    assert victim.total(FAILED) == failed
    assert health.seen == {200}
    until(lambda: not any(worker.is_running() for worker in engines["1"].workers), "the dead engine's workers are gone")


def is_lost(outcome: Outcome, front_end: str) -> bool:
    """Whether all its client got, after any output, was one clear error, and no end that looks like a whole answer."""
    # vLLM's Rust front end has the message for clients with 503 alone.
    code = 503 if front_end == RUST else 500
    return (
        outcome.error_codes == [code]
        and "was lost while it served this request" in outcome.errors[0]
        and f"waited {REPLICA_WAIT_S} s" in outcome.errors[0]
        and outcome.status == (200 if outcome.started.is_set() else code)
    )


@pytest.mark.both_front_ends
@pytest.mark.long
def test_without_any_engine_requests_are_refused_until_one_is_back(victim: Server, front_end: str) -> None:
    with Load(victim) as load:
        with busy_and_suspended(victim, load) as (work, engines):
            for engine in engines.values():
                engine.core.kill()
        until(lambda: victim.replicas_up() == 0, "both losses are noticed")
        load.wait()
        ended = [outcome for replica in work.values() for outcome in replica.requests]
        assert [outcome for outcome in ended if len(outcome.errors) != 1 or outcome.finish_reasons] == []
        assert [
            outcome for replica in work.values() for outcome in replica.long if not is_lost(outcome, front_end)
        ] == []
        refused = [load.send(SHORT, stream) for stream in (True, False)]
        load.wait()
        assert victim.health() == 503
    # A stream of vLLM's Rust front end has begun when it asks its engine.
    assert [outcome.status for outcome in refused] == [200 if front_end == RUST else 503, 503]
    for outcome in refused:
        assert outcome.error_codes == [503]
        assert outcome.errors[0].startswith("No replica of stage 0 can serve right now")
    assert victim.process.poll() is None
    assert set(victim.by_replica(IN_FLIGHT).values()) == {0}

    until(lambda: victim.health() == 200, "one replica is back", START_S)
    with Load(victim) as load:
        answer = load.send(SHORT, stream=False)
    assert answer.finished_whole
