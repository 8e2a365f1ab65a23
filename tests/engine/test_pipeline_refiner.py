"""Two models with tokenizers of their own, one after the other: the example `refiner`."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion

from tests.pipeline.scenarios import cases

from . import by_hand
from .conftest import DEV_MODE, RUNTIME_LORA
from .lora import make_lora
from .pipelines import ExampleWorld, PipelineServer, shared_example
from .server import MODEL, until
from .servers import Servers

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]

THINKER, REFINER = 0, 1
DRAFT_TOKENS = 32
"""As the example's file says."""
ANSWER_TOKENS = 24
PROMPTS = ["How many stages are there?", "Begin."]


@pytest.fixture
def refiner(servers: Servers) -> Iterator[PipelineServer]:
    yield from shared_example(servers, "refiner", 2, "--enable-lora", **DEV_MODE, **RUNTIME_LORA)


def ask(server: PipelineServer, prompt: str, model: str = MODEL, **omni: Any) -> ChatCompletion:
    with server.client() as client:
        return client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=ANSWER_TOKENS,
            extra_body={"omni": omni},
        )


def text_of(answer: ChatCompletion) -> str:
    return answer.choices[0].message.content or ""


def refined(server: PipelineServer, question: str, style: str = "in plain words") -> tuple[str, str]:
    """The draft and the answer that the two models give by hand."""
    prompt = by_hand.chat_prompt(server.models / "thinker", question)
    draft = by_hand.answer(server.models / "thinker", prompt, DRAFT_TOKENS)
    return draft, refined_draft(server, question, draft, style)


def refined_draft(server: PipelineServer, question: str, draft: str, style: str = "in plain words") -> str:
    """The answer that the second model gives to a draft by hand."""
    prompt = by_hand.without_specials(
        server.models / "thinker", by_hand.chat_prompt(server.models / "thinker", question)
    )
    return by_hand.answer(server.models / "refiner", f"{prompt}\nDraft: {draft}\nThe same {style}: ", ANSWER_TOKENS)


def drafted(answer: ChatCompletion) -> str:
    """What the first stage has put out."""
    draft: str = (answer.model_extra or {})["omni"]["outputs"]["thinker"]["text"]
    return draft


def is_paused(server: PipelineServer) -> bool:
    with server.http() as http:
        return bool(http.get("/is_paused").json()["is_paused"])


@pytest.mark.parametrize(("prompt", "style"), [(PROMPTS[0], "plain"), (PROMPTS[1], "formal")])
def test_the_answer_is_that_of_the_models_run_by_hand(refiner: PipelineServer, prompt: str, style: str) -> None:
    draft, expected = refined(refiner, prompt, f"in {style} words")
    answer = ask(refiner, prompt, outputs=["thinker"], timings=True, params={"style": style})
    assert text_of(answer) == expected
    extra = (answer.model_extra or {})["omni"]
    assert extra["outputs"] == {"thinker": {"text": draft}}
    assert extra["timings"].keys() == {"thinker", "refiner"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens == ANSWER_TOKENS


@pytest.mark.parametrize(("scenario", "stage_id"), cases([THINKER, REFINER]))
async def test_what_happens_to_a_request(refiner: PipelineServer, scenario: Any, stage_id: int) -> None:
    def check(answer: Any) -> None:
        assert answer["choices"][0]["message"]["content"] == refined(refiner, PROMPTS[1])[1]

    body = {"messages": [{"role": "user", "content": PROMPTS[1]}], "max_tokens": ANSWER_TOKENS}
    await scenario(ExampleWorld(refiner, "/v1/chat/completions", body, check, 2), stage_id)


def test_a_pause_stops_both_stages_at_once_and_their_requests_go_on_afterwards(refiner: PipelineServer) -> None:
    expected = refined(refiner, PROMPTS[0])[1]
    with ThreadPoolExecutor() as threads, refiner.http() as http:
        with refiner.suspended(REFINER):
            begun = threads.submit(ask, refiner, PROMPTS[0])
            until(lambda: refiner.in_flight(REFINER) == 1, "the second stage has the request")
            pausing = threads.submit(http.post, "/pause", params={"mode": "keep"})
            until(lambda: is_paused(refiner), "the first stage is paused")
            late = threads.submit(ask, refiner, PROMPTS[0])
            until(lambda: refiner.in_flight(THINKER) == 1, "the first stage holds another request")
        try:
            assert pausing.result().status_code == 200
            assert not late.done()
        finally:
            http.post("/resume").raise_for_status()
        assert [text_of(answer.result()) for answer in (begun, late)] == [expected] * 2


def test_a_pause_that_aborts_ends_an_answer_as_one_engine_does_whatever_stage_it_is_in(refiner: PipelineServer) -> None:
    with ThreadPoolExecutor() as threads, refiner.http() as http:
        http.post("/pause", params={"mode": "keep"}).raise_for_status()
        try:
            pending = threads.submit(ask, refiner, PROMPTS[0])
            until(lambda: refiner.in_flight(THINKER) == 1, "the first stage has the request")
            http.post("/pause", params={"mode": "abort"}).raise_for_status()
            (choice,) = pending.result().choices
        finally:
            http.post("/resume").raise_for_status()
    assert (choice.finish_reason, choice.message.content) == ("abort", "")


def test_an_adapter_is_for_the_stage_that_reads_the_prompt(refiner: PipelineServer, tmp_path: Path) -> None:
    adapter = {"lora_name": "poet", "lora_path": str(make_lora(tmp_path / "lora", seed=1))}
    plain = ask(refiner, PROMPTS[0], outputs=["thinker"])
    with refiner.http() as http:
        http.post("/v1/load_lora_adapter", json=adapter).raise_for_status()
        try:
            poetic = ask(refiner, PROMPTS[0], model="poet", outputs=["thinker"])
            assert text_of(ask(refiner, PROMPTS[0])) == text_of(plain)
        finally:
            http.post("/v1/unload_lora_adapter", json=adapter).raise_for_status()
    draft = drafted(poetic)
    assert draft != drafted(plain)
    # The second stage answers as it does to any draft.
    assert text_of(poetic) == refined_draft(refiner, PROMPTS[0], draft)
