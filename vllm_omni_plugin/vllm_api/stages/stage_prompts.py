"""The inputs of a stage as prompts of vLLM's engine."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm.inputs import TextPrompt, TokensPrompt, embeds_input, tokens_input

from vllm_omni_plugin.pipeline.transfer import StageInput
from vllm_omni_plugin.vllm_api.stages.stage_encoder import plain_encoder

NO_EMBEDDINGS = "its engine takes no embeddings: add 'enable-prompt-embeds: true' to its engine_args"


class StagePrompts:
    """Makes prompts; may be used by several threads.

    Args:
        fed: whether other stages feed it: what makes the tokens of their texts soon is a copy of the tokenizer.
    """

    def __init__(self, renderer: Any, fed: bool) -> None:
        self._renderer = renderer
        self._config = renderer.model_config
        # A prompt that is too long is refused later, with its length in the error.
        self._tokenizing = replace(renderer.default_cmpl_tok_params, max_total_tokens=None)
        self._encode = plain_encoder(renderer.tokenizer, self._tokenizing) if fed else None

    def make(self, given: StageInput, cache_salt: str | None) -> Mapping[str, Any]:
        """The prompt that vLLM's input processing takes.

        Raises:
            ValueError: there is not exactly one of tokens, text and embeddings, or the engine cannot take it.
        """
        there = [name for name in ("token_ids", "text", "tensor") if getattr(given, name) is not None]
        if len(there) != 1:
            what = " and ".join(there) or "neither"
            raise ValueError(f"it takes one of token_ids, text and tensor, and was given {what}")
        if given.text is not None:
            return self._of_text(given.text, cache_salt)
        if given.tensor is not None:
            return self._of_tensor(given.tensor, cache_salt)
        return dict(tokens_input(list(given.token_ids or ()), cache_salt=cache_salt))

    def _of_text(self, text: str, cache_salt: str | None) -> Mapping[str, Any]:
        if self._renderer.tokenizer is None:
            raise ValueError("it has no tokenizer for text")
        given = TextPrompt(prompt=text)
        if self._encode is not None:
            given = TokensPrompt(prompt=text, prompt_token_ids=self._encode(text))
        prompt: dict[str, Any]
        (prompt,) = self._renderer.render_cmpl([given], self._tokenizing)
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        return prompt

    def _of_tensor(self, tensor: Any, cache_salt: str | None) -> Mapping[str, Any]:
        if not self._config.enable_prompt_embeds:
            raise ValueError(NO_EMBEDDINGS)
        width = self._config.get_inputs_embeds_size()
        if tensor.ndim != 2 or tensor.shape[1] != width or not tensor.is_floating_point():
            raise ValueError(
                f"it takes embeddings as floats of the shape [tokens, {width}], not {tensor.dtype} of the shape "
                f"{list(tensor.shape)}"
            )
        return dict(embeds_input(tensor.detach().cpu(), cache_salt=cache_salt))


def length_of(prompt: Mapping[str, Any]) -> int:
    """Tokens of a prompt."""
    return len(prompt["prompt_embeds"] if prompt["type"] == "embeds" else prompt["prompt_token_ids"])
