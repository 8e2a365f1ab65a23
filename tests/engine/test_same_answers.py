"""A client cannot tell the fleet from one plain engine by what it answers, whichever replica does."""

from functools import partial

import httpx
import pytest

from .answers import ask, differences
from .both_replicas import answers_of_both
from .cases import CASES, COMPLETIONS, Case
from .server import MODEL, Server

CACHED_TOKENS = 128
"""The one whole block of the prompt below."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_fleet_answers_as_one_plain_engine(plain: Server, fleet: Server, case: Case) -> None:
    expected = ask(plain, case.path, case.body)
    assert expected["status"] == case.status, expected
    send = partial(ask, fleet, case.path, case.body)
    answers = answers_of_both(fleet, send) if case.reaches_engine else [send()]
    for answer in answers:
        assert differences(expected, answer) == []


def test_a_cached_prompt_is_reported_as_by_one_plain_engine(plain: Server, fleet: Server) -> None:
    prompt = "Nothing of this was asked before. " * 16
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    assert [cached_tokens(plain, body) for _ in range(2)] == [0, CACHED_TOKENS]
    assert cached_tokens(fleet, body) == 0
    answers_of_both(fleet, partial(cached_tokens, fleet, body))
    assert cached_tokens(fleet, body) == CACHED_TOKENS


def cached_tokens(server: Server, body: dict[str, object]) -> int:
    answer = httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=60.0).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
