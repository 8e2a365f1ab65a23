"""Engines that are killed in the middle of answers, and the answers that nevertheless are those of one engine."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .answers import ask, differences
from .conftest import TWO_ENGINES, TWO_REPLICAS
from .lora import make_lora
from .moves import ADAPTER, ROWS, TOKENS, Row
from .server import START_S, Server, until
from .servers import Servers
from .suspended import Engine, engines_of

COPIES = 2
"""One for each replica: equal requests that come in turn go to replicas in turn."""
BEGUN_TOKENS = 8
"""Tokens that each answer has on average when the engine dies."""

IN_FLIGHT = "vllm_omni:requests_in_flight"
MOVES = "vllm_omni:request_moves_total"
SWALLOWED = "vllm_omni:tokens_swallowed_total"
FAILED = "vllm_omni:requests_failed_total"
GENERATED = "vllm:generation_tokens_total"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_lora(tmp_path_factory.mktemp("moving") / "lora", seed=1)


@pytest.fixture
def movers(servers: Servers, tiny_model: Path, adapter: Path) -> Iterator[Server]:
    """A fleet of two that both serve, before each test and after it."""
    lora = ("--enable-lora", "--lora-modules", f"{ADAPTER}={adapter}")
    server = servers.get("movers", tiny_model, *TWO_REPLICAS, *lora, engines=2, **TWO_ENGINES)
    until(lambda: server.replicas_up() == 2, "both replicas serve", START_S)
    yield server
    until(lambda: server.replicas_up() == 2, "both replicas serve again", START_S)


@pytest.fixture
def whole(movers: Server) -> dict[Row, Any]:
    """The answers of engines that live."""
    with ThreadPoolExecutor(len(ROWS)) as threads:
        answers = list(threads.map(partial(send, movers), ROWS))
    return dict(zip(ROWS, answers, strict=True))


def send(server: Server, row: Row) -> Any:
    return ask(server, row.path, row.body)


def total(server: Server, name: str) -> float:
    return sum(server.metrics(name).values())


def moves(server: Server) -> Counter[str]:
    return Counter({dict(labels)["way"]: int(value) for labels, value in server.metrics(MOVES).items()})


@contextmanager
def all_begun(
    server: Server, rows: tuple[Row, ...]
) -> Iterator[tuple[list[tuple[Row, Future[Any]]], dict[str, Engine]]]:
    """Each replica has begun its copy of every row when both stand still; what is not killed then goes on."""
    engines = engines_of(server)
    for engine in engines.values():
        engine.suspend()
    before = server.by_engine(GENERATED)
    with ThreadPoolExecutor(COPIES * len(rows)) as threads:
        try:
            answers = [(row, dispatch(server, threads, row)) for row in rows for _ in range(COPIES)]
            for replica, engine in engines.items():
                until(partial(has_begun, server, replica, engine, before), f"replica {replica} has begun all answers")
            yield answers, engines
        finally:
            for engine in engines.values():
                engine.resume()


def dispatch(server: Server, threads: ThreadPoolExecutor, row: Row) -> Future[Any]:
    """Send a request and wait until replicas are charged with it, all samples of its `n`."""
    expected = total(server, IN_FLIGHT) + row.body.get("n", 1)
    answer = threads.submit(send, server, row)
    until(lambda: total(server, IN_FLIGHT) == expected, f"{row} is dispatched")
    return answer


def has_begun(server: Server, replica: str, engine: Engine, before: dict[str, float]) -> bool:
    engine.run_for_a_moment()
    tokens = server.by_engine(GENERATED)[replica] - before.get(replica, 0.0)
    return tokens >= BEGUN_TOKENS * server.by_replica(IN_FLIGHT)[replica]


def wrong(row: Row, answer: Any, whole: Any) -> list[str]:
    """How an answer differs from the one of an engine that lives."""
    if row.exact:
        return differences(answer, whole, str(row))
    (got, expected) = (shape(value) for value in (answer, whole))
    return [] if got == expected else [f"{row}: {got} != {expected}"]


def shape(answer: Any) -> Any:
    body = answer["body"]
    return answer["status"], [choice["finish_reason"] for choice in body["choices"]], body["usage"]


def test_a_killed_engine_costs_no_answer_a_token(movers: Server, whole: dict[Row, Any]) -> None:
    before, swallowed, failed = moves(movers), total(movers, SWALLOWED), total(movers, FAILED)
    with all_begun(movers, ROWS) as (answers, engines):
        engines["1"].core.kill()
        until(lambda: movers.replicas_up() == 1, "the loss is noticed")
    assert [line for row, answer in answers for line in wrong(row, answer.result(), whole[row])] == []
    # A request with several samples has them on both replicas.
    assert moves(movers) - before == Counter(row.way for row in ROWS)
    assert total(movers, SWALLOWED) > swallowed
    assert total(movers, FAILED) == failed


def test_answers_outlive_every_engine_there_was(movers: Server, whole: dict[Row, Any]) -> None:
    before = moves(movers)
    rows = tuple(row for row in ROWS if row.exact)
    with all_begun(movers, rows) as (answers, engines):
        for engine in engines.values():
            engine.core.kill()
        until(lambda: movers.replicas_up() == 0, "both losses are noticed")
        late = ROWS[0]
        with ThreadPoolExecutor(1) as threads:
            held = threads.submit(send, movers, late)
            until(lambda: movers.replicas_up() > 0, "a replica is back", START_S)
            assert wrong(late, held.result(), whole[late]) == []
    assert [line for row, answer in answers for line in wrong(row, answer.result(), whole[row])] == []
    assert sum((moves(movers) - before).values()) == sum(COPIES * row.body.get("n", 1) for row in rows)


def test_what_the_rows_promise_is_mid_stream(whole: dict[Row, Any]) -> None:
    """Long enough that an engine cannot have finished any of them when it is killed."""
    for row, answer in whole.items():
        body = answer.get("body") or answer["stream"]["joined"][next(iter(answer["stream"]["joined"]))]
        assert 400 < body["usage"]["completion_tokens"] <= row.body.get("n", 1) * TOKENS, row
