"""Prompts of `POST /omni/explain` are read by vLLM's own renderer, within the model's limits."""

from types import SimpleNamespace

import pytest
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.lora.request import LoRARequest

from tests.contract.pipeline_http.app import make_model
from vllm_omni_plugin.admin.explain import BadPromptError, UnknownModelError
from vllm_omni_plugin.integration.http.completion_prompts import read_prompt

MAX_MODEL_LEN = 32


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What vLLM's application holds once its server has started, as far as it takes no engine."""
    models = OpenAIServingModels.__new__(OpenAIServingModels)
    models.lora_requests = {"adapter": LoRARequest("adapter", 1, "/nowhere")}
    models.registry = SimpleNamespace(is_base_model=lambda name: name in {"tiny", "alias"})
    return SimpleNamespace(
        online_renderer=make_model(tmp_path_factory.mktemp("model"), MAX_MODEL_LEN).online, openai_serving_models=models
    )


@pytest.mark.parametrize("model", [None, "", "tiny", "alias"])
async def test_a_prompt_has_the_tokens_that_a_completion_has(state: SimpleNamespace, model: str | None) -> None:
    prompt = await read_prompt(state, "Once upon a time", model)
    assert prompt.token_ids == state.online_renderer.renderer.tokenizer("Once upon a time").input_ids
    assert prompt.lora_name == ""


async def test_an_adapter_has_blocks_of_its_own(state: SimpleNamespace) -> None:
    assert (await read_prompt(state, "Once", "adapter")).lora_name == "adapter"


@pytest.mark.parametrize(
    ("text", "model", "error", "reason"),
    [
        pytest.param("Once", "other", UnknownModelError, "`other`", id="unknown model"),
        pytest.param("0 1 2 3 " * MAX_MODEL_LEN, None, BadPromptError, str(MAX_MODEL_LEN), id="too long"),
        pytest.param("", None, BadPromptError, r"\w", id="empty"),
    ],
)
async def test_a_prompt_that_cannot_be_completed_is_refused(
    state: SimpleNamespace, text: str, model: str | None, error: type[Exception], reason: str
) -> None:
    with pytest.raises(error, match=reason):
        await read_prompt(state, text, model)
