"""The structured-output backend, one for all requests of a fleet."""

from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config
from vllm.utils.mistral import is_mistral_tokenizer


def fix_backend(vllm_config: Any) -> None:
    """Replace the backend `auto` by one, before the first request.

    With `auto` vLLM chooses by each request's schema, but an engine keeps the backend of its first schema until it
    ends. So the same request would succeed at one replica and fail at another. The backend is the one that vLLM tries
    first: `xgrammar`, the only one with all structural tags of tool calls; and `guidance` for Mistral's tokenizers
    whose tool calls are Lark grammars.
    """
    config = vllm_config.structured_outputs_config
    if config.backend == "auto":
        tokenizer = cached_tokenizer_from_config(vllm_config.model_config)
        config.backend = "guidance" if is_mistral_tokenizer(tokenizer) and tokenizer.is_tekken else "xgrammar"
