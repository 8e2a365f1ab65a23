"""Prompts of our own routes, read as vLLM's completions read theirs."""

from typing import Any

from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.exceptions import VLLMClientError

from vllm_omni_plugin.admin.explain import BadPromptError, UnknownModelError
from vllm_omni_plugin.balancing.prompt import Prompt


class CompletionPrompts:
    """Satisfies `admin.explain.PromptReader` with the server's own tokenizer and limits.

    Args:
        state: of vLLM's application; what it holds of models and renderers is there once the server has started.
    """

    def __init__(self, state: Any) -> None:
        self._state = state

    async def __call__(self, text: str, model: str | None) -> Prompt:
        """See `PromptReader`."""
        lora_name = self._lora_name(model)
        try:
            request = CompletionRequest(prompt=text, max_tokens=1)
            rendered = await self._state.online_renderer.render_completion(request, skip_mm_cache=True)
        except (VLLMClientError, ValueError) as error:
            raise BadPromptError(str(error)) from error
        if not isinstance(rendered, list):
            raise BadPromptError(rendered.error.message)
        token_ids = rendered[0]["prompt_token_ids"]
        if not token_ids:
            raise BadPromptError("The prompt has no tokens.")
        return Prompt(token_ids, lora_name)

    def _lora_name(self, model: str | None) -> str:
        models = self._state.openai_serving_models
        if not model or models.is_base_model(model):
            return ""
        lora = models.lora_requests.get(model)
        if lora is None:
            raise UnknownModelError(f"The model `{model}` does not exist.")
        name: str = lora.lora_name
        return name
