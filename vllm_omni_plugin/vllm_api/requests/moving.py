"""How vLLM's requests go on at another replica, judged by what their sampling looks back at.

vLLM's sampler sees prompt and output of a request apart. What it derives from both together, or from the next token's
logits alone, is the same whether produced tokens are output or have become prompt: such a request resumes. What it
derives from the output alone, or from a state that grows with it, needs the same output again: such a request replays.
"""

import copy
from collections.abc import Sequence
from importlib.metadata import entry_points
from typing import Any

import msgspec
from vllm.sampling_params import _SAMPLING_EPS
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.pool.late_interaction import LATE_INTERACTION_MODE_SCORE_DOC

from vllm_omni_plugin.vllm_api.requests.engine_types import Move
from vllm_omni_plugin.vllm_api.requests.request_building import TRANSFER_PARAMS

PROCESSOR_PLUGINS = "vllm.logits_processors"


def has_custom_logits_processors(model_config: Any) -> bool:
    """Whether the engines apply logits processors of a third party, which may look back at anything."""
    return bool(model_config.logits_processors) or bool(entry_points(group=PROCESSOR_PLUGINS))


def transfers_cache(request: Any) -> bool:
    """Whether an `EngineCoreRequest` transfers a cache: the other side keeps it until it has been fetched, once."""
    params = request.sampling_params
    return params is not None and not TRANSFER_PARAMS.isdisjoint(params.extra_args or ())


def how_to_move(request: Any, custom_processors: bool) -> Move:
    """How an `EngineCoreRequest` goes on once part of its answer has been delivered; see the module."""
    params = request.sampling_params
    if params is None:
        return Move.PINNED if _scores_document(request.pooling_params) else Move.NEVER
    if request.resumable or transfers_cache(request):
        return Move.NEVER
    if _is_seeded(params) or custom_processors or depends_on_output(request):
        return Move.REPLAY
    return Move.RESUME


def continuation(request: Any, move: Move, produced: Sequence[int]) -> Any:
    """A copy of the request that produces what is missing (`RESUME`) or everything again (`REPLAY`)."""
    # Prompt log-probabilities have been delivered with the first token.
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
    """The `EngineCoreOutputs` that end a request which has got all its tokens, or None.

    vLLM's engines send the end with the last token, and refuse a request for no tokens.
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


def trim_repeated(output: Any, swallow: int) -> None:
    """Make an `EngineCoreOutput` one in the middle of an answer: without its first tokens and what is told once.

    Times of queueing and prefill, and what the prompt cost, were told by the first attempt; told again they would
    overwrite the request's own. Where a replay's log-probabilities belong to tokens that are swallowed, so do they.
    """
    output.events = output.prefill_stats = None
    output.new_prompt_logprobs_tensors = output.prompt_token_id_logprobs = None
    rest = len(output.new_token_ids) - swallow
    if output.routed_experts is not None:
        # One row for each token of the prompt, too.
        output.routed_experts = output.routed_experts[len(output.routed_experts) - rest :]
    if not swallow:
        return
    output.new_token_ids = output.new_token_ids[swallow:]
    if output.new_logprobs is not None:
        output.new_logprobs = output.new_logprobs.slice_request(swallow, rest)
    if output.new_sampling_mask is not None:
        mask = output.new_sampling_mask
        output.new_sampling_mask = mask.slice_request(swallow, rest) if rest else None


def _scores_document(params: Any) -> bool:
    # Its engine dies of it where the embeddings of its query are not.
    late_interaction = params and params.late_interaction_params
    return bool(late_interaction and late_interaction.mode == LATE_INTERACTION_MODE_SCORE_DOC)


def _is_seeded(params: Any) -> bool:
    return params.temperature >= _SAMPLING_EPS and params.seed is not None


def depends_on_output(request: Any) -> bool:
    """Whether the next token depends on the output in a way that it does not depend on a prompt.

    Stop strings do not count: engines do not look for them.
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
        # Custom arguments are there for custom sampling.
        or params.extra_args
        # A word of several tokens is forbidden once its beginning is in the output.
        or (params.bad_words_token_ids and any(len(word) > 1 for word in params.bad_words_token_ids))
        # Embeddings in the prompt cannot be continued by tokens.
        or request.prompt_embeds is not None
    )
