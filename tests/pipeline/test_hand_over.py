"""Chunks and KV caches between stages: what is refused, and which stage reads the prompt and answers."""

from pathlib import Path
from typing import Any

import pytest

from vllm_omni_plugin.pipeline import Modality, Pipeline, PipelineError, Stage, load_pipeline

from .files import DIAMOND, PREFILL, SPEECH, complaint, tail


def vllm(id_: int, *inputs: str, **more: Any) -> Stage:
    given: dict[str, Any] = {"model": "m", "output": Modality.TEXT, "final": True}
    return Stage(id=id_, name=f"s{id_}", engine="vllm", inputs=inputs, **given | more)


def python(id_: int, *inputs: str, **more: Any) -> Stage:
    given: dict[str, Any] = {"output": Modality.AUDIO, "final": True, "transform": "a.b:c"}
    return Stage(id=id_, name=f"s{id_}", engine="a.b:C", inputs=inputs, **given | more)


PREFILL_STAGE = vllm(0, output=Modality.KV_CACHE, final=False)


def test_a_kv_cache_is_handed_over_by_its_own_transform(file: Path) -> None:
    file.write_text(PREFILL)
    pipeline = load_pipeline(file)
    prefill, decode = pipeline.stages
    assert pipeline.transform_of(decode) == "kv_transfer"
    assert (pipeline.entry, pipeline.answer_stage_of(["text"])) == (prefill, decode)
    assert (pipeline.prompt_stage, pipeline.sampled_by_client(["text"])) == (decode, decode)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("output: kv_cache", "output: kv_cache, final: true"),
            "2: stages[0].final: a KV cache cannot be final: another stage must take it",
        ),
        (
            ("engine: vllm, model: m, output", "engine: 'a.b:C', output"),
            "2: stages[0].output: only vLLM's engine can output a KV cache",
        ),
        (
            ("output: kv_cache", "output: kv_cache, sampling: {temperature: 0}"),
            "2: stages[0].sampling: a stage that only fills a KV cache samples nothing",
        ),
        (
            ("model: m, inputs", "model: n, inputs"),
            "3: stages[1].model: the KV cache of 'prefill' belongs to its model, 'm'",
        ),
        (
            ("engine: vllm, model: m, inputs", "engine: 'a.b:C', inputs"),
            "3: stages[1].engine: only vLLM's engine takes the KV cache of 'prefill'",
        ),
        (
            ("inputs: [prefill]", "inputs: [prefill], async_chunk: true"),
            "3: stages[1].async_chunk: a KV cache is handed over whole, not in chunks",
        ),
        (
            ("inputs: [prefill]", "inputs: [prefill], transform: tokens"),
            "3: stages[1].transform: 'tokens' does not take kv_cache of the stage 'prefill': set 'transform' to "
            "'kv_transfer'",
        ),
        (
            ("inputs: [prefill]", "inputs: [prefill], transform: 'a.b:c'"),
            "3: stages[1].transform: 'a.b:c' does not take kv_cache of the stage 'prefill': set 'transform' to "
            "'kv_transfer'",
        ),
    ],
    ids=tail,
)
def test_a_kv_cache_goes_from_engine_to_engine_of_one_model(file: Path, change: tuple[str, str], message: str) -> None:
    file.write_text(PREFILL.replace(*change))
    assert complaint(file) == f"pipeline.yaml:{message}"


@pytest.mark.parametrize(
    ("stages", "place", "message"),
    [
        (
            (vllm(0), vllm(1, "s0", output=Modality.KV_CACHE, final=False), vllm(2, "s1")),
            ("stages", 1, "inputs"),
            "the KV cache is that of the request's own prompt: leave out 'inputs'",
        ),
        (
            (PREFILL_STAGE, vllm(1), vllm(2, "s0", "s1", transform="a.b:c")),
            ("stages", 2, "inputs"),
            "the KV cache of 's0' must be the only input",
        ),
        ((vllm(0, async_chunk=True),), ("stages", 0, "async_chunk"), "no stage's chunks reach a stage without inputs"),
        (
            (vllm(0), vllm(1), python(2, "s0", "s1", async_chunk=True)),
            ("stages", 2, "async_chunk"),
            "chunks come from one stage, and this one has 2 inputs",
        ),
        (
            (vllm(0), vllm(1, "s0", async_chunk=True)),
            ("stages", 1, "async_chunk"),
            "set 'max_tokens', which bounds the answer to each chunk",
        ),
        (
            (vllm(0), vllm(1, "s0", async_chunk=True, sampling={"temperature": 0})),
            ("stages", 1, "sampling"),
            "set 'max_tokens', which bounds the answer to each chunk",
        ),
        (
            (vllm(0, "s1", transform="a.b:c"), python(1)),
            ("stages",),
            "no stage without inputs is a vLLM stage, which is needed to read the prompt",
        ),
    ],
    ids=tail,
)
def test_invalid_kv_transfers_are_refused(
    stages: tuple[Stage, ...], place: tuple[str | int, ...], message: str
) -> None:
    with pytest.raises(PipelineError) as raised:
        Pipeline(stages)
    assert (raised.value.place, raised.value.message) == (place, message)


@pytest.mark.parametrize(
    ("modalities", "expected"),
    [
        pytest.param(["text"], "s3", id="the last of text"),
        pytest.param(["tokens"], "s2", id="tokens"),
        pytest.param(["tokens", "text"], "s3", id="text before tokens"),
        pytest.param(["scores"], "s4", id="scores"),
        pytest.param(["audio"], None, id="speech answers another way"),
    ],
)
def test_the_answering_stage_is_the_last_final_stage_with_text(modalities: list[str], expected: str | None) -> None:
    pipeline = Pipeline(
        (
            vllm(0),
            python(1, "s0"),
            vllm(2, "s0", output=Modality.TOKENS),
            vllm(3, "s0"),
            vllm(4, "s3", output=Modality.SCORES),
            vllm(5, "s3", final=False),
            python(6, "s5"),
        )
    )
    found = pipeline.answer_stage_of(modalities)
    assert (found.name if found is not None else None) == expected


def test_a_request_gets_text_by_default_or_else_everything() -> None:
    assert load_pipeline(SPEECH).default_modalities == ("text",)
    assert load_pipeline(DIAMOND).default_modalities == ("text",)
    silent = Pipeline((vllm(0, final=False), python(1, "s0"), vllm(2, "s0", output=Modality.SCORES)))
    assert set(silent.default_modalities) == {"audio", "scores"}
