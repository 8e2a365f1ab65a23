"""Stages whose file does not fit their models, and the tasks of pooling models."""

from pathlib import Path
from typing import Any

import pytest

from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.pipeline import Modality, PipelineError, StageInput

from .stage_models import api, config, model, source

CHUNKED: dict[str, Any] = {"inputs": ("thinker",), "async_chunk": True}
SCORES: dict[str, Any] = {"output": Modality.SCORES}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def generating(folder: Path) -> Any:
    return config(folder)


@pytest.fixture(scope="module")
def scoring(folder: Path) -> Any:
    return config(folder, runner="pooling", convert="classify")


def fault(own: Any, **fields: Any) -> tuple[tuple[str | int, ...], str]:
    with pytest.raises(PipelineError) as raised:
        api(own, **fields)
    return raised.value.place, raised.value.message


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        ({"output": Modality.AUDIO}, ("output",), "its model generates, so it puts out one of text, tokens, kv_cache"),
        (
            {"transform": "prompt_embeds", "inputs": ("thinker",)},
            ("transform",),
            "its engine takes no embeddings: add 'enable-prompt-embeds: true' to its engine_args",
        ),
        (
            {"sampling": {"max_tokens": 3, "temperature": 9.0}},
            ("sampling", "temperature"),
            "temperature must be in [0, 2], got 9.0. (parameter=temperature, value=9.0)",
        ),
        (
            {"sampling": {"max_tokens": 3, "min_tokens": 4}},
            ("sampling",),
            "min_tokens must be less than or equal to max_tokens=3, got 4.",
        ),
        (
            {"sampling": {"stop": "red"}, "output": Modality.TOKENS},
            ("sampling", "stop"),
            "stop strings need a stage whose output is text; use 'stop_token_ids'",
        ),
        (
            {"sampling": {"stop": "red", "max_tokens": 2}} | CHUNKED,
            ("sampling", "stop"),
            "a stage that works on chunks cannot stop at strings; use 'stop_token_ids'",
        ),
    ],
)
def test_faults_of_a_generating_stage(
    generating: Any, fields: dict[str, Any], place: tuple[str, ...], message: str
) -> None:
    assert fault(generating, **fields) == (place, message)


def test_parameters_out_of_the_models_range_are_errors_of_the_file(generating: Any) -> None:
    place, message = fault(generating, sampling={"logit_bias": {999: 1.0}})
    assert place == ("sampling",)
    assert message.startswith("token_id(s) [999] in logit_bias contain out-of-vocab token ids.")


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        ({"output": Modality.TEXT}, ("output",), "its model pools, so it puts out one of scores, embedding, latent"),
        (SCORES | CHUNKED, ("async_chunk",), "vLLM's pooling models take no chunks"),
        (
            SCORES | {"sampling": {"temperature": 0.0}},
            ("sampling", "temperature"),
            "unknown parameter 'temperature': use use_activation, dimensions, step_tag_id, returned_token_ids, task",
        ),
        (SCORES | {"sampling": {"task": "clasify"}}, ("sampling", "task"), "Invalid enum value 'clasify'"),
        (SCORES | {"sampling": {"dimensions": "big"}}, ("sampling", "dimensions"), "Expected `int | null`, got `str`"),
    ],
)
def test_faults_of_a_pooling_stage(scoring: Any, fields: dict[str, Any], place: tuple[str, ...], message: str) -> None:
    assert fault(scoring, **fields) == (place, message)


def test_text_needs_a_tokenizer(folder: Path) -> None:
    mute = config(folder, skip_tokenizer_init=True)
    assert fault(mute) == (("output",), "text needs a tokenizer, and its engine has none")
    stage_api = api(mute, output=Modality.TOKENS)
    assert stage_api.build(source(), StageInput(token_ids=[3]), {}, for_client=False).prompt_token_ids == [3]
    with pytest.raises(StageInputError, match="Stage 'refiner': it has no tokenizer for text"):
        stage_api.build(source(), StageInput(text="red"), {}, for_client=False)
    assert stage_api.prompt_text(source()) == ""


@pytest.mark.parametrize(
    ("architecture", "arguments", "task"),
    [
        ("LlamaForCausalLM", {"convert": "embed"}, "embed"),
        ("LlamaForCausalLM", {"convert": "classify"}, "classify"),
        ("LlamaForSequenceClassification", {}, "classify"),
        ("LlamaForCausalLM", {"convert": "embed", "pooler_config": {"task": "token_embed"}}, "token_embed"),
    ],
)
def test_the_task_of_a_pooling_model_follows_from_its_configuration(
    tmp_path: Path, architecture: str, arguments: dict[str, Any], task: str
) -> None:
    from vllm.config import PoolerConfig

    if "pooler_config" in arguments:
        arguments = arguments | {"pooler_config": PoolerConfig(**arguments["pooler_config"])}
    own = config(model(tmp_path, architectures=[architecture]), runner="pooling", **arguments)
    stage_api = api(own, **SCORES)
    request = stage_api.build(source(), StageInput(text="red"), {}, for_client=False)
    assert (stage_api.pooling_task, request.pooling_params.task, request.sampling_params) == (task, task, None)


def test_the_file_but_no_request_may_set_the_task_of_a_pooling_model(scoring: Any) -> None:
    stage_api = api(scoring, sampling={"task": "token_classify", "use_activation": False}, **SCORES)
    params = stage_api.build(
        source(), StageInput(text="red"), {"use_activation": True}, for_client=False
    ).pooling_params
    assert (params.task, params.use_activation) == ("token_classify", True)
    with pytest.raises(StageInputError, match="Stage 'refiner': the task can be set only in the pipeline's file"):
        stage_api.build(source(), StageInput(text="red"), {"task": "embed"}, for_client=False)


def test_a_pooling_model_may_fill_its_context_with_the_prompt(scoring: Any) -> None:
    stage_api = api(scoring, **SCORES)
    assert len(stage_api.build(source(), StageInput(token_ids=[3] * 32), {}, for_client=False).prompt_token_ids) == 32
    with pytest.raises(StageInputError, match="the input has 33 tokens and its model takes at most 32"):
        stage_api.build(source(), StageInput(token_ids=[3] * 33), {}, for_client=False)
