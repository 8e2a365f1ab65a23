"""Decides how a request continues on another replica, and changes the request and its outputs for it.

vLLM's sampler distinguishes a request's prompt from its output. If the next token depends on both together, or on the
logits alone, the produced tokens can become part of the prompt: the request resumes. If it depends on the output alone,
or on state that grows with the output, the same output must be produced again: the request replays.
"""

import copy
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import msgspec
from vllm.sampling_params import _SAMPLING_EPS
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.pool.late_interaction import LATE_INTERACTION_MODE_SCORE_DOC

from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Move
from vllm_omni_plugin.vllm_api.engine_messages.request_building import TRANSFER_PARAMS

PROCESSOR_PLUGINS = "vllm.logits_processors"
_KV_TRANSFER = "kv_transfer_params"


def has_custom_logits_processors(model_config: Any) -> bool:
    """Whether the engines use third-party logits processors, which may depend on anything."""
    return bool(model_config.logits_processors) or bool(entry_points(group=PROCESSOR_PLUGINS))


def transfers_cache(request: Any) -> bool:
    """Whether a request transfers a cache. The other side keeps that cache until it has been fetched once."""
    params = request.sampling_params
    return params is not None and not TRANSFER_PARAMS.isdisjoint(params.extra_args or ())


def awaits_cache(request: Any) -> bool:
    """Whether a request may wait for a cache that another engine sends; a prefill only sends its own."""
    if not transfers_cache(request):
        return False
    parameters = request.sampling_params.extra_args.get(_KV_TRANSFER) or {}
    return not (isinstance(parameters, dict) and parameters.get("do_remote_decode"))


def without_hand_over(request: Any) -> Any:
    """The request, or a copy that does not name a cache that another engine has kept for it, and reads none.

    Outputs of encoders stay: they are named by a hash of their content, and nothing can compute them without the media.
    """
    if not awaits_cache(request) or _KV_TRANSFER not in request.sampling_params.extra_args:
        return request
    params = copy.copy(request.sampling_params)
    params.extra_args = {name: value for name, value in params.extra_args.items() if name != _KV_TRANSFER} or None
    # A connector may find the cache again without the parameters.
    params.skip_reading_prefix_cache = True
    return msgspec.structs.replace(request, sampling_params=params)


def how_to_move(request: Any, custom_processors: bool) -> Move:
    """Whether a request that had output resumes behind it, is replayed and compared, or cannot move."""
    params = request.sampling_params
    if params is None:
        return Move.PINNED if _scores_document(request.pooling_params) else Move.NEVER
    if request.resumable or transfers_cache(request):
        return Move.NEVER
    if _is_seeded(params) or custom_processors or depends_on_output(request):
        return Move.REPLAY
    return Move.RESUME


def continuation(request: Any, move: Move, produced: Sequence[int]) -> Any:
    """A copy of the request that produces the rest of its answer (`RESUME`) or all of it again (`REPLAY`)."""
    # Prompt log-probabilities were delivered with the first token.
    params = copy.copy(request.sampling_params)
    if params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None:
        params.prompt_logprobs = params.prompt_logprob_token_ids = params.prompt_logprob_start = None
        params.skip_reading_prefix_cache = False
    if move is Move.REPLAY:
        return msgspec.structs.replace(request, sampling_params=params)
    params.max_tokens -= len(produced)
    params.min_tokens = max(0, params.min_tokens - len(produced))
    prompt = [*request.prompt_token_ids, *produced]
    return msgspec.structs.replace(request, sampling_params=params, prompt_token_ids=prompt)


def end_if_complete(request: Any, produced: Sequence[int], engine_index: int) -> Any | None:
    """The `EngineCoreOutputs` that end a request if all its tokens were produced, else None.

    vLLM's engines send the end with the last token, and refuse a request for zero tokens.
    """
    params = request.sampling_params
    if not produced or params is None:
        return None
    last = produced[-1]
    if last == params.eos_token_id or last in (params.stop_token_ids or ()):
        reason, stop = FinishReason.STOP, None if last == params.eos_token_id else last
    elif len(produced) >= params.max_tokens:
        reason, stop = FinishReason.LENGTH, None
    else:
        return None
    end = EngineCoreOutput(request_id=request.request_id, new_token_ids=[], finish_reason=reason, stop_reason=stop)
    return EngineCoreOutputs(engine_index=engine_index, outputs=[end])


def trim_repeated(output: Any, repeated: int) -> None:
    """Remove from an output of a moved request its first `repeated` tokens, and fields that were delivered before.

    The first attempt delivered the times of queueing and prefill and the prompt's statistics. A second delivery would
    overwrite them.
    """
    output.events = output.prefill_stats = None
    output.new_prompt_logprobs_tensors = output.prompt_token_id_logprobs = None
    rest = len(output.new_token_ids) - repeated
    if output.routed_experts is not None:
        # Prompt tokens have rows too.
        output.routed_experts = output.routed_experts[len(output.routed_experts) - rest :]
    if not repeated:
        return
    output.new_token_ids = output.new_token_ids[repeated:]
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(repeated, rest)
    if output.new_sampling_mask is not None:
        mask = output.new_sampling_mask
        output.new_sampling_mask = mask.slice_request(repeated, rest) if rest else None


def _scores_document(params: Any) -> bool:
    # An engine without the embeddings of its query dies of such a request.
    late_interaction = params and params.late_interaction_params
    return bool(late_interaction and late_interaction.mode == LATE_INTERACTION_MODE_SCORE_DOC)


def _is_seeded(params: Any) -> bool:
    return params.temperature >= _SAMPLING_EPS and params.seed is not None


def depends_on_output(request: Any) -> bool:
    """Whether the next token depends on the output in another way than on the prompt.

    Stop strings do not count: engines do not check them.
    """
    params = request.sampling_params
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.structured_outputs is not None
        or params.thinking_token_budget is not None
        or params.repetition_detection is not None
        or params.trace_decode_token_ids
        or params.watermarking
        # Custom sampling may read custom arguments.
        or params.extra_args
        # A bad word of several tokens is forbidden only once its first tokens are in the output.
        or (params.bad_words_token_ids and any(len(word) > 1 for word in params.bad_words_token_ids))
        # Tokens cannot be appended to a prompt of embeddings.
        or request.prompt_embeds is not None
    )
