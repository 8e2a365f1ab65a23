"""Answers that engines make several tokens at a time, by speculative decoding, go on elsewhere without a lost token."""

from collections import Counter
from pathlib import Path

import pytest

from .conftest import TWO_REPLICAS
from .moves import EXACT, ROWS, STREAM, Row, kill_one, whole_answers
from .server import START_S, Server, until
from .servers import Servers

NGRAM = ("--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}')
"""Drafts are what followed the same tokens before."""
# Not one with a seed: with speculative decoding vLLM's CPU engine does not repeat its answer, moved or not.
SHOWN = (
    *(row for row in ROWS if str(row) in ("greedy", "chat-stream", "logprobs-stream", "stop-strings", "regex")),
    # Of so few tokens that most have followed the same ones before.
    Row("few-tokens", "resume", {"allowed_token_ids": [70, 71, 72], **STREAM}),
)
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
TRIES = 5
MANY = 100
"""Accepted drafts; no engine makes as many by chance."""


@pytest.fixture
def speculating(servers: Servers, tiny_model: Path) -> Server:
    """A fleet of two whose engines draft tokens."""
    server = servers.get("speculating", tiny_model, *TWO_REPLICAS, *EXACT, *NGRAM, engines=2)
    until(lambda: server.replicas_up() == 2, "both replicas serve", START_S)
    return server


@pytest.mark.long
def test_a_killed_engine_that_drafts_tokens_costs_no_answer_a_token(speculating: Server) -> None:
    whole = whole_answers(speculating, SHOWN)
    assert speculating.total(ACCEPTED) > MANY
    # With drafts answers may have been whole by then, on a busy machine all of them.
    moved = next(filter(None, (kill_one(speculating, SHOWN, whole) for _ in range(TRIES))), None)
    assert moved is not None
    assert moved <= Counter(row.way for row in SHOWN)
