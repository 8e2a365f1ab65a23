"""Engines that are killed in the middle of answers, and the answers that nevertheless are those of one engine."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .conftest import TWO_REPLICAS
from .moves import COPIES, EXACT, Row, all_begun, kill_one, moves, rows_of, send, tokens_of, whole_answers, wrong
from .server import FRONT_ENDS, START_S, Server, until
from .servers import Servers

LONG = 400
"""Tokens: no engine has finished such an answer when it is killed."""

SWALLOWED = "vllm_omni_fleet:tokens_swallowed_total"
FAILED = "vllm_omni_fleet:requests_failed_total"


pytestmark = pytest.mark.both_front_ends


@pytest.fixture
def rows(front_end: str) -> tuple[Row, ...]:
    return rows_of(front_end)


@pytest.fixture
def movers(servers: Servers, tiny_model: Path, front_end: str) -> Iterator[Server]:
    """A fleet of two that both serve, before each test and after it."""
    # In one of the tests nobody serves until an engine has started anew.
    flags, environment = (*TWO_REPLICAS, *EXACT, "--omni-replica-wait", str(START_S)), FRONT_ENDS[front_end]
    server = servers.get(f"movers-{front_end}", tiny_model, *flags, engines=2, **environment)
    until(lambda: server.replicas_up() == 2, "both replicas serve", START_S)
    yield server
    until(lambda: server.replicas_up() == 2, "both replicas serve again", START_S)


@pytest.fixture
def whole(movers: Server, rows: tuple[Row, ...]) -> dict[Row, Any]:
    answers = whole_answers(movers, rows)
    assert [str(row) for row, answer in answers.items() if tokens_of(answer) < LONG] == []
    return answers


@pytest.mark.long
def test_a_killed_engine_costs_no_answer_a_token(movers: Server, rows: tuple[Row, ...], whole: dict[Row, Any]) -> None:
    swallowed, failed = movers.total(SWALLOWED), movers.total(FAILED)
    moved = kill_one(movers, rows, whole)
    # Each copy of a request with several samples has them on both replicas.
    assert moved == Counter(row.way for row in rows for _ in range(row.body.get("n", 1)))
    assert movers.total(SWALLOWED) > swallowed
    assert movers.total(FAILED) == failed


@pytest.mark.long
def test_answers_outlive_every_engine_there_was(movers: Server, rows: tuple[Row, ...], whole: dict[Row, Any]) -> None:
    before, failed = moves(movers), movers.total(FAILED)
    rows = tuple(row for row in rows if row.exact)
    with all_begun(movers, rows) as (answers, engines):
        for engine in engines.values():
            engine.core.kill()
        until(lambda: movers.replicas_up() == 0, "both losses are noticed")
        late = rows[0]
        with ThreadPoolExecutor(1) as threads:
            held = threads.submit(send, movers, late)
            until(lambda: movers.replicas_up() > 0, "a replica is back", START_S)
            assert wrong(late, held.result(), whole[late]) == []
    assert [line for row, answer in answers for line in wrong(row, answer.result(), whole[row])] == []
    # Some move twice: to a replica whose loss has not been noticed yet.
    assert sum((moves(movers) - before).values()) >= sum(COPIES * row.body.get("n", 1) for row in rows)
    assert movers.total(FAILED) == failed
