"""Reads prompts of `POST /omni/explain` where only the Rust front end has a tokenizer."""

import asyncio
from collections.abc import Callable, Collection
from typing import Any

from vllm_omni_plugin.admin.explain import BadPromptError, UnknownModelError
from vllm_omni_plugin.balancing import Prompt
from vllm_omni_plugin.integration.http.completion_prompts import prompt_tokens


class ModelPrompts:
    """Loads vLLM's tokenizer of the model when the first text is to be read. Token ids need none."""

    def __init__(self, vllm_config: Any, models: Collection[str], adapters: Callable[[], Collection[str]]) -> None:
        self._config = vllm_config
        self._models = models
        self._adapters = adapters
        self._renderer: Any = None
        self._loading = asyncio.Lock()

    async def read(self, prompt: str | list[int], model: str | None) -> Prompt:
        lora_name = ""
        if model and model not in self._models:
            if model not in self._adapters():
                raise UnknownModelError(f"The model `{model}` does not exist.")
            lora_name = model
        if isinstance(prompt, list):
            self._check(prompt)
            return Prompt(prompt, lora_name)
        async with self._loading:
            if self._renderer is None:
                self._renderer = await asyncio.to_thread(_load, self._config)
        return Prompt(await prompt_tokens(self._renderer, prompt), lora_name)

    def _check(self, token_ids: list[int]) -> None:
        limit = self._config.model_config.max_model_len
        if not token_ids:
            raise BadPromptError("The prompt has no tokens.")
        if len(token_ids) > limit:
            raise BadPromptError(f"The prompt has {len(token_ids)} tokens, and the model takes at most {limit}.")
        if min(token_ids) < 0:
            raise BadPromptError(f"{min(token_ids)} is not a token id.")


def _load(vllm_config: Any) -> Any:
    from vllm.renderers import renderer_from_config
    from vllm.renderers.online_renderer import OnlineRenderer

    return OnlineRenderer(
        vllm_config.model_config,
        renderer_from_config(vllm_config),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
    )
