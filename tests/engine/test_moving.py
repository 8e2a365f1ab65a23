"""Engines that are killed in the middle of answers, and the answers that nevertheless are those of one engine."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from .conftest import two_replicas
from .lora import make_lora
from .moves import (
    COPIES,
    EXACT,
    ROWS,
    STREAM,
    Row,
    all_begun,
    kill_one,
    moves,
    rows_of,
    send,
    tokens_of,
    whole_answers,
    wrong,
)
from .server import FAILED, FRONT_ENDS, START_S, Server, until
from .servers import Servers

LONG = 400
"""Tokens: no engine has finished such an answer when it is killed."""

SWALLOWED = "vllm_omni_fleet:tokens_swallowed_total"
ADAPTERS = ("storyteller", "poet")
# Not without an adapter beside them: in such a batch vLLM's CPU kernels do not repeat its answer, moved or not.
ADAPTED = tuple(Row(name, "resume", {"model": name}) for name in ADAPTERS)
DRAFTS = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}')
"""They are what followed the same tokens before."""
# Not one with a seed: with speculative decoding vLLM's CPU engine does not repeat its answer, moved or not.
DRAFTED = (
    *(row for row in ROWS if str(row) in ("greedy", "chat-stream", "logprobs-stream", "stop-strings", "regex")),
    # Of so few tokens that most have followed the same ones before.
    Row("few-tokens", "resume", {"allowed_token_ids": [70, 71, 72], **STREAM}),
)
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
MANY = 100
"""Accepted drafts; no engine makes as many by chance."""

pytestmark = pytest.mark.long


@pytest.fixture
def rows(front_end: str) -> tuple[Row, ...]:
    return rows_of(front_end)


@pytest.fixture
def movers(servers: Servers, tiny_model: Path, front_end: str) -> Iterator[Server]:
    """A fleet of two that both serve, before each test and after it."""
    # In one of the tests nobody serves until an engine has started anew.
    flags = (*EXACT, "--omni-replica-wait", str(START_S))
    server = two_replicas(servers, f"movers-{front_end}", tiny_model, *flags, **FRONT_ENDS[front_end])
    yield server
    until(lambda: server.replicas_up() == 2, "both replicas serve again", START_S)


@pytest.fixture
def whole(movers: Server, rows: tuple[Row, ...]) -> dict[Row, Any]:
    answers = whole_answers(movers, rows)
    assert [str(row) for row, answer in answers.items() if tokens_of(answer) < LONG] == []
    return answers


@pytest.mark.both_front_ends
def test_a_killed_engine_costs_no_answer_a_token(movers: Server, rows: tuple[Row, ...], whole: dict[Row, Any]) -> None:
    swallowed, failed = movers.total(SWALLOWED), movers.total(FAILED)
    moved = kill_one(movers, rows, whole)
    # Each copy of a request with several samples has them on both replicas.
    assert moved == Counter(row.way for row in rows for _ in range(row.body.get("n", 1)))
    assert movers.total(SWALLOWED) > swallowed
    assert movers.total(FAILED) == failed


@pytest.mark.both_front_ends
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


def test_a_moved_answer_keeps_its_adapter(servers: Servers, tiny_model: Path, tmp_path: Path) -> None:
    paths = [f"{name}={make_lora(tmp_path / name, seed)}" for seed, name in enumerate(ADAPTERS)]
    lora = ("--enable-lora", "--max-loras", "2", "--lora-modules", *paths)
    fleet = two_replicas(servers, "moving-lora", tiny_model, *EXACT, *lora)
    whole = whole_answers(fleet, ADAPTED)
    assert len({answer["body"]["choices"][0]["text"] for answer in whole.values()}) == len(ADAPTED)
    assert kill_one(fleet, ADAPTED, whole) == Counter(resume=len(ADAPTED))


def test_a_killed_engine_that_drafts_tokens_costs_no_answer_a_token(servers: Servers, tiny_model: Path) -> None:
    fleet = two_replicas(servers, "speculating", tiny_model, *EXACT, *DRAFTS)
    whole = whole_answers(fleet, DRAFTED)
    assert fleet.total(ACCEPTED) > MANY
    # With drafts answers may have been whole by then, on a busy machine all of them.
    moved = next(filter(None, (kill_one(fleet, DRAFTED, whole) for _ in range(5))), None)
    assert moved is not None
    assert moved <= Counter(row.way for row in DRAFTED)
