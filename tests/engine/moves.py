"""Requests that move in the middle of their answers, for the features in the table of docs/behaviour.md."""

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from .answers import comparable, differences, join_events
from .server import IN_FLIGHT, MODEL, MOVES, RUST, START_S, Server, until
from .suspended import PATIENT, Engine, engines_of

EXACT = ("--dtype", "float32", *PATIENT)
"""A moved request's cache is computed in one batch instead of token by token; in bfloat16 that rounds otherwise."""
COPIES = 2
"""One for each replica: equal requests that come in turn go to replicas in turn."""
BEGUN_TOKENS = 8
"""Tokens that each answer has on average when the engine dies."""
TIMEOUT_S = 240.0
"""More than engines need to come back."""
GENERATED = "vllm:generation_tokens_total"

TOKENS = 600
PROMPT = "A head takes every request"
STREAM: dict[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
SAMPLED: dict[str, Any] = {"temperature": 0.9}
SEEDED: dict[str, Any] = {"temperature": 0.9, "seed": 1234}
LOGPROBS: dict[str, Any] = {"logprobs": 3}
"""As many for all: a request behind vLLM's Rust front end gets what another one in its batch has asked for, too."""
EACH_LETTER = {f"{letter}": 1.5 for letter in range(70, 90)}


@dataclass(frozen=True, eq=False)
class Row:
    """One request and how it moves.

    Bad words are asked for in chats: vLLM's Rust front end ignores them in completions.

    Attributes:
        way: value of the label `way` of its move.
        exact: whether its whole answer is the same every time; else only its shape is.
    """

    name: str
    way: str
    changes: dict[str, Any]
    exact: bool = True
    path: str = "/v1/completions"
    body: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        input_ = (
            {"prompt": PROMPT} if self.path == "/v1/completions" else {"messages": [{"role": "user", "content": "?"}]}
        )
        fixed = {"model": MODEL, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        object.__setattr__(self, "body", {**fixed, **input_, **self.changes})

    def __str__(self) -> str:
        return self.name


ROWS = (
    Row("greedy", "resume", {}),
    Row("greedy-stream", "resume", STREAM),
    Row("chat-stream", "resume", STREAM, path="/v1/chat/completions"),
    Row("sampled", "resume", SAMPLED | {"top_p": 0.9, "top_k": 50, "min_p": 0.01}, exact=False),
    Row("n", "resume", SAMPLED | {"n": 2}, exact=False),
    Row("logprobs", "resume", LOGPROBS),
    Row("logprobs-stream", "resume", LOGPROBS | STREAM),
    Row("prompt-logprobs", "resume", {"prompt_logprobs": 2}),
    Row("echo-logprobs", "resume", {"echo": True} | LOGPROBS),
    Row("min-tokens", "resume", {"min_tokens": 450, "stop_token_ids": list(range(3, 512))}),
    Row("stop-strings", "resume", {"min_tokens": 450, "stop": ["a", "e", "s", "t"], **STREAM}),
    Row("repetition-penalty", "resume", {"repetition_penalty": 1.3}),
    Row("one-token-bad-word", "resume", {"bad_words": ["e"]}, path="/v1/chat/completions"),
    Row("logit-bias", "resume", {"logit_bias": EACH_LETTER}),
    Row("allowed-tokens", "resume", {"allowed_token_ids": list(range(60, 120))}),
    Row("token-ids", "resume", {"return_token_ids": True, **STREAM}),
    Row("seed", "replay", SEEDED),
    Row("seed-stream-logprobs", "replay", SEEDED | LOGPROBS | STREAM),
    Row("seeded-n", "replay", SEEDED | {"n": 2}),
    Row("penalties", "replay", {"presence_penalty": 1.5, "frequency_penalty": 0.2, **STREAM}),
    Row("sampled-penalties", "replay", SAMPLED | {"presence_penalty": 1.5}, exact=False),
    Row("bad-words", "replay", {"bad_words": ["every request", "engines are"]}, path="/v1/chat/completions"),
    Row("regex", "replay", {"structured_outputs": {"regex": "([ab]{3}-[0-9]{4} ){200}"}, **STREAM}),
    Row(
        "sampled-regex", "replay", SAMPLED | {"structured_outputs": {"regex": "([ab]{3}-[0-9]{4} ){200}"}}, exact=False
    ),
    Row("repetition-detection", "replay", {"repetition_detection": {"max_pattern_size": 2, "min_count": 400}}),
)


def rows_of(front_end: str) -> tuple[Row, ...]:
    """Those that this front end answers: vLLM's Rust front end refuses several samples."""
    return tuple(row for row in ROWS if front_end != RUST or "n" not in row.changes)


def send(server: Server, row: Row) -> Any:
    """Status and comparable content of the whole answer."""
    with server.http(TIMEOUT_S) as client:
        response = client.post(row.path, json=row.body)
    if row.body.get("stream") and response.is_success:
        return {"status": response.status_code, "stream": join_events(response.text)}
    return {"status": response.status_code, "body": comparable(response.json())}


def tokens_of(answer: Any) -> int:
    """Tokens of an answer, over all samples; 0 if there was none."""
    body = answer.get("body") or next(iter(answer["stream"]["joined"].values()))
    return int(body.get("usage", {}).get("completion_tokens", 0))


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


def whole_answers(server: Server, rows: tuple[Row, ...]) -> dict[Row, Any]:
    with ThreadPoolExecutor(len(rows)) as threads:
        return dict(zip(rows, threads.map(partial(send, server), rows), strict=True))


def kill_one(server: Server, rows: tuple[Row, ...], whole: dict[Row, Any]) -> Counter[str]:
    """Kill the engine of replica 1 in the middle of its copies of all rows; no answer differs from its whole one.

    Returns:
        The moves, by way.
    """
    until(lambda: server.replicas_up() == len(server.engine_pids()), "all replicas serve", START_S)
    before = moves(server)
    with all_begun(server, rows) as (answers, engines):
        engines["1"].core.kill()
        until(lambda: server.replicas_up() == 1, "the loss is noticed")
    assert [line for row, answer in answers for line in wrong(row, answer.result(), whole[row])] == []
    return moves(server) - before


def dispatch(server: Server, threads: ThreadPoolExecutor, row: Row) -> Future[Any]:
    """Send a request and wait until replicas are charged with it, all samples of its `n`."""
    expected = server.total(IN_FLIGHT) + row.body.get("n", 1)
    answer = threads.submit(send, server, row)
    until(lambda: server.total(IN_FLIGHT) == expected, f"{row} is assigned")
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
