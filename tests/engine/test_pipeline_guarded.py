"""An answer that a classifier reads before the client does: the example `guarded`."""

from collections.abc import Iterator
from typing import Any

import pytest

from . import by_hand
from .pipelines import PipelineServer, shared_example
from .server import MODEL
from .servers import Servers

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

ANSWER_TOKENS = 16
REFUSAL = "I would rather not say."
SAFE, UNSAFE = "Tell me", "hello"
"""Prompts whose answers have no digit, and at least one: what the guard finds unsafe."""


@pytest.fixture
def guarded(servers: Servers) -> Iterator[PipelineServer]:
    yield from shared_example(servers, "guarded", 3)


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
