"""An answer that a classifier reads before the client does: the example `guarded`."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from . import by_hand
from .pipelines import PipelineServer
from .server import MODEL, until
from .servers import Servers

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

GENERATOR, GUARD, GATE = 0, 1, 2
ANSWER_TOKENS = 16
REFUSAL = "I would rather not say."
SAFE, UNSAFE = "Tell me", "hello"
"""Prompts whose answers have no digit, and at least one: what the guard finds unsafe."""


@pytest.fixture
def guarded(servers: Servers) -> Iterator[PipelineServer]:
    """The example, all stages in service before each test and after it."""
    server: PipelineServer = servers.keep("guarded", lambda log: PipelineServer("guarded", log).__enter__(), engines=2)
    server.wait_for_replicas(3)
    yield server
    server.wait_for_replicas(3)
    server.wait_until_idle()


def ask(server: PipelineServer, prompt: str) -> tuple[str, dict[str, Any]]:
    """What is said, and what the stages in front of the gate have put out."""
    with server.client() as client:
        answer = client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": prompt}],
            extra_body={"omni": {"outputs": ["generator", "guard"]}},
        )
    return answer.choices[0].message.content or "", (answer.model_extra or {})["omni"]["outputs"]


def generated(server: PipelineServer, question: str) -> str:
    """What the generator says by hand."""
    generator = server.models / "generator"
    return by_hand.answer(generator, by_hand.chat_prompt(generator, question), ANSWER_TOKENS)


@pytest.mark.parametrize("prompt", [SAFE, UNSAFE])
def test_the_verdict_decides_what_is_said(guarded: PipelineServer, prompt: str) -> None:
    text = generated(guarded, prompt)
    assert any(sign.isdigit() for sign in text) is (prompt == UNSAFE)
    said, outputs = ask(guarded, prompt)
    assert said == (REFUSAL if prompt == UNSAFE else text)
    assert outputs["generator"] == {"text": text}
    expected = by_hand.class_probabilities(guarded.models / "guard", text)
    assert outputs["guard"]["scores"] == pytest.approx(expected, abs=1e-4)


def test_no_word_leaves_before_the_verdict(guarded: PipelineServer) -> None:
    with guarded.client() as client:
        stream = client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": UNSAFE}], stream=True
        )
        said = "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices)
    assert said == REFUSAL


def test_nothing_is_left_of_a_request_whose_client_leaves_during_the_second_stage(guarded: PipelineServer) -> None:
    with guarded.suspended(GUARD), guarded.client() as client:
        stream = client.completions.create(model=MODEL, prompt="Leaves soon", stream=True)
        until(lambda: guarded.in_flight(GUARD) == 1, "the guard has the request")
        stream.close()
        until(lambda: guarded.in_flight(GUARD) == 0, "the guard is rid of the request")
    guarded.wait_until_idle()
    assert guarded.in_flight(GATE) == 0


@pytest.mark.parametrize("stage", [GENERATOR, GUARD, GATE])
def test_a_replica_killed_in_the_middle_of_a_request_costs_no_answer(guarded: PipelineServer, stage: int) -> None:
    with ThreadPoolExecutor() as threads:
        with guarded.suspended(stage) as engine:
            answer = threads.submit(ask, guarded, SAFE)
            until(lambda: guarded.in_flight(stage) == 1, "the stage has the request")
            engine.core.kill()
        assert answer.result()[0] == generated(guarded, SAFE)
