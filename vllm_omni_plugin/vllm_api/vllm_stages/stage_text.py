"""Reads tokens and text from the outputs of a stage, and compares its vocabulary with that of the entry stage."""

import copy
from collections.abc import Sequence
from typing import Any

from vllm.tokenizers import cached_tokenizer_from_config, maybe_make_thread_pool
from vllm.v1.engine import FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from vllm_omni_plugin.pipeline import StageOutput
from vllm_omni_plugin.pipeline.output_reader import OutputReader
from vllm_omni_plugin.vllm_api.vllm_stages.stage_params import KV_TRANSFER_PARAMS

_NAME_TOKENS = ("allowed_token_ids", "logit_bias", "logprob_token_ids", "trace_decode_token_ids")
"""Sampling parameters that contain token ids."""
_ABOUT_THE_PROMPT = ("prompt_logprobs", "prompt_logprob_token_ids")
_TOKENIZER = ("tokenizer", "tokenizer_mode", "tokenizer_revision", "trust_remote_code")


class TokenReader(OutputReader):
    """Reads tokens and tensors. A stop token is dropped, as in the text, unless the request includes stop strings."""

    def __init__(self, request: Any) -> None:
        super().__init__()
        params = request.sampling_params
        self._keeps_stop = params is None or params.include_stop_str_in_output

    def _read(self, output: Any, ended: bool) -> StageOutput:
        reason = output.finish_reason if ended else None
        token_ids = output.new_token_ids
        if self._at_stop_token(output) and not self._keeps_stop:
            token_ids = token_ids[:-1]
        return StageOutput(
            token_ids=token_ids,
            tensor=output.pooling_output,
            metadata=_metadata(output),
            finish_reason=None if reason is None else str(reason),
        )

    def _at_stop_token(self, output: Any) -> bool:
        return bool(output.new_token_ids) and output.finish_reason == FinishReason.STOP


class TextReader(TokenReader):
    """Reads text as vLLM's server does, with its handling of stop strings."""

    def __init__(self, request: Any, tokenizer: Any) -> None:
        super().__init__(request)
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)

    def _read(self, output: Any, ended: bool) -> StageOutput:
        """Text and tokens up to a stop string or stop token, and these only if the client wants to see them."""
        detokenizer = self._detokenizer
        before = detokenizer.num_output_tokens()
        stop_string = detokenizer.update(output.new_token_ids, output.finish_reason == FinishReason.STOP)
        token_ids = detokenizer.output_token_ids[before:]
        if self._at_stop_token(output) and stop_string is None and not self._keeps_stop:
            token_ids = token_ids[:-1]
        reason = FinishReason.STOP if stop_string is not None else output.finish_reason if ended else None
        return StageOutput(
            token_ids=token_ids,
            text=detokenizer.get_next_output_text(reason is not None, delta=True),
            metadata=_metadata(output),
            finish_reason=None if reason is None else str(reason),
        )


def _metadata(output: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if output.prefill_stats is not None:
        metadata["cached_tokens"] = output.prefill_stats.num_cached_tokens
    if output.kv_transfer_params is not None:
        metadata[KV_TRANSFER_PARAMS] = output.kv_transfer_params
    return metadata


class Vocabulary:
    """Compares a stage's vocabulary with that of the entry stage, whose model reads the prompts of clients."""

    def __init__(self, tokenizer: Any, config: Any, entry_config: Any) -> None:
        self.same_model = config is entry_config or all(
            getattr(config, name) == getattr(entry_config, name) for name in ("model", "revision", *_TOKENIZER)
        )
        self._entry_tokenizer = tokenizer if self.same_model else _for_threads(entry_config)
        self._entry_ends = _ends(entry_config, self._entry_tokenizer)
        self._same = self.same_model or _same(tokenizer, self._entry_tokenizer)

    def prompt_text(self, token_ids: Sequence[int] | None) -> str:
        """A prompt of the entry stage as text, without special tokens; "" without tokens or tokenizer."""
        if not token_ids or self._entry_tokenizer is None:
            return ""
        return str(self._entry_tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def clear_entry_tokens(self, params: Any) -> None:
        """Remove from a copy of a client's sampling parameters all values that depend on the entry stage's tokenizer.

        vLLM's input processing then adds the values of this stage's tokenizer. With another vocabulary all stop token
        ids are removed, since those of the client cannot be distinguished from those of the entry stage's model. Raises
        ValueError if a parameter refers to tokens of the entry stage.
        """
        names = _ABOUT_THE_PROMPT if self._same else _ABOUT_THE_PROMPT + _NAME_TOKENS
        foreign = [name for name in names if getattr(params, name) not in (None, [], {})]
        if foreign:
            raise ValueError(f"{foreign[0]!r} refers to tokens of the model that reads the prompt")
        kept = set(params.stop_token_ids or ()) - self._entry_ends if self._same else set()
        params.stop_token_ids = sorted(kept)
        params._all_stop_token_ids = kept
        params._bad_words_token_ids = None
        if params.structured_outputs is not None:
            params.structured_outputs._backend = None
            params.structured_outputs._backend_was_auto = False


def _for_threads(config: Any) -> Any:
    # A copy, since vLLM changes the class of the tokenizer that it makes thread-safe.
    tokenizer = copy.copy(cached_tokenizer_from_config(config))
    return None if tokenizer is None else maybe_make_thread_pool(tokenizer)


def _same(tokenizer: Any, other: Any) -> bool:
    return tokenizer is not None and other is not None and tokenizer.get_vocab() == other.get_vocab()


def _ends(config: Any, tokenizer: Any) -> set[int]:
    named = config.try_get_generation_config().get("eos_token_id")
    ends = {named} if isinstance(named, int) else set(named or ())
    return ends if tokenizer is None else ends | {tokenizer.eos_token_id}
