"""Prompts of `POST /omni/explain` are read by vLLM's own renderer, within the model's limits."""

import asyncio
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest

from tests.contract.pipeline_http.app import make_model
from vllm_omni_plugin.admin.explain import BadPromptError, PromptReader, UnknownModelError
from vllm_omni_plugin.integration.http.completion_prompts import read_prompt
from vllm_omni_plugin.integration.rust_front_end.model_prompts import ModelPrompts

MAX_MODEL_LEN = 32


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What vLLM's application holds once its server has started, as far as it takes no engine."""
    models = OpenAIServingModels.__new__(OpenAIServingModels)
    models.lora_requests = {"adapter": LoRARequest("adapter", 1, "/nowhere")}
    models.registry = SimpleNamespace(is_base_model=lambda name: name in {"tiny", "alias"})
    model = make_model(tmp_path_factory.mktemp("model"), MAX_MODEL_LEN)
    return SimpleNamespace(online_renderer=model.online, openai_serving_models=models, config=model.config)


@pytest.fixture(params=["Python", "Rust"])
def read(state: SimpleNamespace, request: pytest.FixtureRequest) -> PromptReader:
    """How each front end's head reads a prompt."""
    if request.param == "Python":
        return partial(read_prompt, state)
    return ModelPrompts(state.config, ["tiny", "alias"], lambda: ["adapter"]).read


@pytest.mark.parametrize("model", [None, "", "tiny", "alias"])
async def test_a_prompt_has_the_tokens_that_a_completion_has(
    state: SimpleNamespace, read: PromptReader, model: str | None
) -> None:
    prompt = await read("Once upon a time", model)
    token_ids = state.online_renderer.renderer.tokenizer("Once upon a time").input_ids
    assert prompt.token_ids == token_ids
    assert prompt.lora_name == ""
    assert (await read(token_ids, model)).token_ids == token_ids


@pytest.mark.parametrize(
    ("prompt", "model", "error", "reason"),
    [
        pytest.param("Once", "other", UnknownModelError, "`other`", id="unknown model"),
        pytest.param("0 1 2 3 " * MAX_MODEL_LEN, None, BadPromptError, str(MAX_MODEL_LEN), id="too long"),
        pytest.param([1] * (MAX_MODEL_LEN + 1), None, BadPromptError, str(MAX_MODEL_LEN), id="too many"),
        pytest.param("", None, BadPromptError, r"\w", id="empty"),
        pytest.param([], None, BadPromptError, r"\w", id="no tokens"),
        pytest.param([-1], None, BadPromptError, "-1", id="no token id"),
    ],
)
async def test_a_prompt_that_cannot_be_completed_is_refused(
    read: PromptReader, prompt: str | list[int], model: str | None, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        await read(prompt, model)


async def test_the_tokenizer_is_loaded_once_for_the_first_text(
    state: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[Any] = []

    def load(model_config: Any, *_: Any, **options: Any) -> Any:
        loaded.append(model_config)
        return state.online_renderer

    monkeypatch.setattr("vllm.renderers.renderer_from_config", lambda config: None)
    monkeypatch.setattr("vllm.renderers.online_renderer.OnlineRenderer", load)
    prompts = ModelPrompts(state.config, ["tiny"], list)
    await prompts.read([1, 2], None)
    assert loaded == []
    await asyncio.gather(*(prompts.read("Once", None) for _ in range(3)))
    assert loaded == [state.config.model_config]
