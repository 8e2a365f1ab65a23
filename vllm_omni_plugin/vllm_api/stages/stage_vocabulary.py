"""The tokenizers of a stage and of the entry stage, and the parameters of a request that depend on them."""

import copy
from collections.abc import Sequence
from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config, maybe_make_thread_pool

_NAME_TOKENS = ("allowed_token_ids", "logit_bias", "logprob_token_ids", "trace_decode_token_ids")
"""Sampling parameters by which a client names tokens."""
_ABOUT_THE_PROMPT = ("prompt_logprobs", "prompt_logprob_token_ids")
_TOKENIZER = ("tokenizer", "tokenizer_mode", "tokenizer_revision", "trust_remote_code")


class Vocabulary:
    """The tokens of a stage beside those of the entry stage, whose model reads the prompts of requests.

    Args:
        tokenizer: of the stage, safe to be used by several threads; None if it has none.
    """

    def __init__(self, tokenizer: Any, config: Any, entry_config: Any) -> None:
        self.same_model = config is entry_config or all(
            getattr(config, name) == getattr(entry_config, name) for name in ("model", "revision", *_TOKENIZER)
        )
        self._entry_tokenizer = tokenizer if self.same_model else _for_threads(entry_config)
        self._entry_ends = _ends(entry_config, self._entry_tokenizer)
        self._same = self.same_model or _same(tokenizer, self._entry_tokenizer)

    def prompt_text(self, token_ids: Sequence[int] | None) -> str:
        """A prompt of the entry's as text, without special tokens; "" where it has no tokens or no tokenizer."""
        if not token_ids or self._entry_tokenizer is None:
            return ""
        return str(self._entry_tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def clear_entry_tokens(self, params: Any) -> None:
        """Remove from a copy of a client's sampling parameters what depends on the entry stage's tokenizer.

        vLLM's input processing then adds what this stage's tokenizer says. With another vocabulary all ids of stop
        tokens are dropped, since those of the client cannot be told from those of the entry's model.

        Raises:
            ValueError: the client asks for what only the entry stage could do.
        """
        names = _ABOUT_THE_PROMPT if self._same else _ABOUT_THE_PROMPT + _NAME_TOKENS
        foreign = [name for name in names if getattr(params, name) not in (None, [], {})]
        if foreign:
            raise ValueError(f"{foreign[0]!r} is about tokens of the model that reads the prompt")
        kept = set(params.stop_token_ids or ()) - self._entry_ends if self._same else set()
        params.stop_token_ids = sorted(kept)
        params._all_stop_token_ids = kept
        params._bad_words_token_ids = None
        if params.structured_outputs is not None:
            params.structured_outputs._backend = None
            params.structured_outputs._backend_was_auto = False


def _for_threads(config: Any) -> Any:
    # A copy, since vLLM changes the class of what it makes safe for threads.
    tokenizer = copy.copy(cached_tokenizer_from_config(config))
    return None if tokenizer is None else maybe_make_thread_pool(tokenizer)


def _same(tokenizer: Any, other: Any) -> bool:
    return tokenizer is not None and other is not None and tokenizer.get_vocab() == other.get_vocab()


def _ends(config: Any, tokenizer: Any) -> set[int]:
    """Ids of the tokens that end a model's answer by default."""
    named = config.try_get_generation_config().get("eos_token_id")
    ends = {named} if isinstance(named, int) else set(named or ())
    return ends if tokenizer is None else ends | {tokenizer.eos_token_id}
