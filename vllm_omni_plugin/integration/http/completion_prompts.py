"""Tokenises prompts of our own routes as vLLM's completions route does."""

from typing import Any

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMClientError

from vllm_omni_plugin.admin.explain import BadPromptError, UnknownModelError
from vllm_omni_plugin.balancing import Prompt


async def read_prompt(state: Any, prompt: str | list[int], model: str | None) -> Prompt:
    """Tokenise a prompt with the tokenizer and limits of the server with this state. As `PromptReader`."""
    models, lora_name = state.openai_serving_models, ""
    if model and not models.is_base_model(model):
        if (lora := models.lora_requests.get(model)) is None:
            raise UnknownModelError(f"The model `{model}` does not exist.")
        lora_name = lora.lora_name
    return Prompt(await prompt_tokens(state.online_renderer, prompt), lora_name)


async def prompt_tokens(renderer: Any, prompt: str | list[int]) -> list[int]:
    """The tokens that a completion of the prompt has. `renderer`: vLLM's `OnlineRenderer`. Raises `BadPromptError`."""
    try:
        request = CompletionRequest(prompt=prompt, max_tokens=1)
        rendered = await renderer.render_completion(request, skip_mm_cache=True)
    except (VLLMClientError, ValueError) as error:
        raise BadPromptError(str(error)) from error
    if not isinstance(rendered, list):
        raise BadPromptError(rendered.error.message)
    token_ids: list[int] = rendered[0]["prompt_token_ids"]
    if not token_ids:
        raise BadPromptError("The prompt has no tokens.")
    return token_ids
