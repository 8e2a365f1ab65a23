"""Prompts computed by one replica and answered by another: the example `prefill_decode`."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from typing import Any

import pytest
from openai.types import Completion

from tests.pipeline.scenarios import cases

from . import by_hand
from .pipelines import ExampleWorld, PipelineServer, shared_example
from .server import MODEL
from .servers import Servers

pytestmark = pytest.mark.timeout(600)

PREFILL, DECODE = 0, 1
DECODE_ENGINE = "10000"
"""Its `engine` label in vLLM's metrics."""
BLOCK, MIN_PROMPT_TOKENS = 32, 64
"""As the example's file says."""
ANSWER_TOKENS = 24
_numbers = count(1)


@pytest.fixture
def disaggregated(servers: Servers) -> Iterator[PipelineServer]:
    yield from shared_example(servers, "prefill_decode", 2, "--enable-prompt-tokens-details")


def new_prompt(server: PipelineServer, tokens: int) -> list[int]:
    """A prompt of so many tokens that shares no block with any before it."""
    words = f"Prompt {next(_numbers)}: " + "a question comes in, an answer goes out, and a graph decides. " * 40
    return by_hand.token_ids(server.models / "model", words)[:tokens]


def ask(server: PipelineServer, prompt: list[int]) -> Completion:
    with server.client() as client:
        return client.completions.create(model=MODEL, prompt=prompt, max_tokens=ANSWER_TOKENS)


def expected(server: PipelineServer, prompt: list[int]) -> str:
    model = server.models / "model"
    return by_hand.text_of(model, by_hand.greedy(model, prompt, ANSWER_TOKENS))


def cached_tokens(answer: Completion) -> int:
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


def handed_over(server: PipelineServer) -> float:
    """Tokens whose KV cache the second stage has got from the first so far."""
    return server.by_engine("vllm:external_prefix_cache_hits_total")[DECODE_ENGINE]


@pytest.mark.parametrize("tokens", [MIN_PROMPT_TOKENS, 200])
def test_a_long_prompt_is_computed_by_the_first_stage(disaggregated: PipelineServer, tokens: int) -> None:
    prompt = new_prompt(disaggregated, tokens)
    before, handed_before = disaggregated.assigned(), handed_over(disaggregated)
    answer = ask(disaggregated, prompt)
    assert answer.choices[0].text == expected(disaggregated, prompt)
    assert disaggregated.assigned() == {stage: number + 1 for stage, number in before.items()}
    # The connector hands over whole blocks, and leaves out the one with the last token.
    assert handed_over(disaggregated) - handed_before == (tokens - 2) // BLOCK * BLOCK


def test_long_prompts_at_once_are_handed_over_whole(disaggregated: PipelineServer) -> None:
    prompts = [new_prompt(disaggregated, 900) for _ in range(8)]
    before, engines = handed_over(disaggregated), [disaggregated.engine(stage).core.pid for stage in (PREFILL, DECODE)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        answers = list(threads.map(partial(ask, disaggregated), prompts))
    assert [answer.choices[0].finish_reason for answer in answers] == ["length"] * len(prompts)
    assert handed_over(disaggregated) - before == len(prompts) * ((900 - 2) // BLOCK * BLOCK)
    assert [disaggregated.engine(stage).core.pid for stage in (PREFILL, DECODE)] == engines


def test_cached_tokens_are_those_that_no_stage_had_to_compute(disaggregated: PipelineServer) -> None:
    prompt = new_prompt(disaggregated, 200)
    assert [cached_tokens(ask(disaggregated, prompt)) for _ in range(2)] == [0, (200 - 1) // BLOCK * BLOCK]


def test_a_short_prompt_skips_the_first_stage(disaggregated: PipelineServer) -> None:
    prompt = new_prompt(disaggregated, MIN_PROMPT_TOKENS - 1)
    before = disaggregated.assigned()
    answer = ask(disaggregated, prompt)
    assert answer.choices[0].text == expected(disaggregated, prompt)
    assert disaggregated.assigned() == before | {DECODE: before[DECODE] + 1}
    assert cached_tokens(answer) == 0


@pytest.mark.parametrize(("scenario", "stage_id"), cases([PREFILL, DECODE], quick={"left-1"}))
async def test_what_happens_to_a_request(disaggregated: PipelineServer, scenario: Any, stage_id: int) -> None:
    prompt = new_prompt(disaggregated, 200)

    def check(answer: Any) -> None:
        assert answer["choices"][0]["text"] == expected(disaggregated, prompt)

    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS}
    await scenario(ExampleWorld(disaggregated, "/v1/completions", body, check, 2), stage_id)


@pytest.mark.long
async def test_a_prefill_that_dies_after_it_has_handed_over(disaggregated: PipelineServer) -> None:
    prompt = new_prompt(disaggregated, 200)

    def check(answer: Any) -> None:
        assert answer["choices"][0]["text"] == expected(disaggregated, prompt)

    body = {"prompt": prompt, "max_tokens": ANSWER_TOKENS}
    world = ExampleWorld(disaggregated, "/v1/completions", body, check, 2)
    async with world.halted_in(DECODE) as call:
        disaggregated.engine(PREFILL).core.kill()
    await world.check(await call.answer())
    await world.rests()


@pytest.mark.long
@pytest.mark.parametrize("stage", [PREFILL, DECODE])
def test_a_headless_node_adds_a_replica_to_either_stage(disaggregated: PipelineServer, stage: int) -> None:
    prompt = new_prompt(disaggregated, 200)
    with disaggregated.node(stage), disaggregated.drained(stage):
        answer = ask(disaggregated, prompt)
    assert answer.choices[0].text == expected(disaggregated, prompt)
    assert cached_tokens(answer) == 0
