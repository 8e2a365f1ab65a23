"""Tokenises prompts of our own routes as vLLM's completions route does."""

from typing import Any

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMClientError

from vllm_omni_plugin.admin.explain import BadPromptError, UnknownModelError
from vllm_omni_plugin.balancing import Prompt


async def read_prompt(state: Any, text: str, model: str | None) -> Prompt:
    """Tokenise a prompt with the server's own tokenizer and limits.

    Args:
        state: of vLLM's application.
        model: the name of the model or of an adapter; None means the model.

    Raises:
        BadPromptError: the server could not complete this prompt.
        UnknownModelError: the server has no such model.
    """
    models, lora_name = state.openai_serving_models, ""
    if model and not models.is_base_model(model):
        if (lora := models.lora_requests.get(model)) is None:
            raise UnknownModelError(f"The model `{model}` does not exist.")
        lora_name = lora.lora_name
    try:
        request = CompletionRequest(prompt=text, max_tokens=1)
        rendered = await state.online_renderer.render_completion(request, skip_mm_cache=True)
    except (VLLMClientError, ValueError) as error:
        raise BadPromptError(str(error)) from error
    if not isinstance(rendered, list):
        raise BadPromptError(rendered.error.message)
    token_ids = rendered[0]["prompt_token_ids"]
    if not token_ids:
        raise BadPromptError("The prompt has no tokens.")
    return Prompt(token_ids, lora_name)
