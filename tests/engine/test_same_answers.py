"""A client cannot tell the fleet from one plain engine by what it answers, whichever replica does."""

from functools import partial
from typing import Any

import httpx
import pytest

from .answers import ask, comparable, differences
from .both_replicas import answers_of_both
from .cases import CASES, COMPLETIONS, PROMPT, RESPONSES, Case
from .server import MODEL, Server, until

CACHED_TOKENS = 128
"""The one whole block of the prompt below."""


@pytest.mark.both_front_ends(newest=True)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_fleet_answers_as_one_plain_engine(plain: Server, fleet: Server, case: Case, front_end: str) -> None:
    expected = ask(plain, case.path, case.body)
    assert expected["status"] == case.status_of(front_end), expected
    send = partial(ask, fleet, case.path, case.body)
    answers = answers_of_both(fleet, send) if case.reaches_engine(front_end) else [send()]
    for answer in answers:
        assert differences(expected, answer) == []


@pytest.mark.both_front_ends(newest=True)
def test_a_cached_prompt_is_reported_as_by_one_plain_engine(plain: Server, fleet: Server) -> None:
    prompt = "Nothing of this was asked before. " * 16
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    assert [cached_tokens(plain, body) for _ in range(2)] == [0, CACHED_TOKENS]
    assert cached_tokens(fleet, body) == 0
    answers_of_both(fleet, partial(cached_tokens, fleet, body))
    assert cached_tokens(fleet, body) == CACHED_TOKENS


@pytest.mark.parametrize("background", [False, True])
def test_a_stored_response_is_found_and_continued_as_from_one_plain_engine(
    plain: Server, fleet: Server, background: bool
) -> None:
    expected = stored_response(plain, background)
    assert expected["found"]["output"]
    for answer in answers_of_both(fleet, partial(stored_response, fleet, background)):
        assert differences(expected, answer) == []


def stored_response(server: Server, background: bool) -> Any:
    """A response that is stored, as it is found by its id, and what continues it."""
    body = {"model": MODEL, "input": PROMPT, "max_output_tokens": 12, "temperature": 0}
    with server.http(60.0) as http:
        made = http.post(RESPONSES, json=body | {"background": background}).raise_for_status().json()

        def found() -> Any:
            response = http.get(f"{RESPONSES}/{made['id']}").raise_for_status().json()
            return response if response["status"] not in ("queued", "in_progress") else None

        kept = until(found, "the response is completed")
        assert background or kept == made
        continued = http.post(RESPONSES, json=body | {"previous_response_id": made["id"]}).raise_for_status().json()
        missing = http.get(f"{RESPONSES}/resp_of_nobody")
    answers = {"made": made, "found": kept, "continued": continued, "missing": missing.json()}
    return {"missing_status": missing.status_code, **comparable(answers)}


def cached_tokens(server: Server, body: dict[str, object]) -> int:
    answer = httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=60.0).json()
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
