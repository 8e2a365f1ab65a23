"""vLLM's requests as those of the model."""

from typing import Any

from vllm_omni_plugin.sim.model.sim_requests import SimRequest


def to_request(request: Any) -> SimRequest:
    """What an `EngineCoreRequest` asks of the model.

    Raises:
        ValueError: it asks for what is not simulated.
    """
    if request.sampling_params is None or request.prompt_token_ids is None or request.resumable:
        raise ValueError("simulated engines generate from token ids only: no pooling, embeddings or streaming input")
    return _sim_request(request.request_id, request, request.cache_salt or "")


def from_scheduler(new: Any) -> SimRequest:
    """What a scheduler's `NewRequestData` asks of the model."""
    return _sim_request(new.req_id, new)


def _sim_request(request_id: str, request: Any, cache_salt: str = "") -> SimRequest:
    params = request.sampling_params
    return SimRequest(
        request_id,
        # A copy, since the scheduler lets the prompt of a streaming-input session grow in place.
        list(request.prompt_token_ids),
        params.max_tokens,
        params.min_tokens,
        frozenset(params.stop_token_ids or ()),
        params.eos_token_id,
        params.allowed_token_ids or (),
        request.lora_request.lora_int_id if request.lora_request else 0,
        cache_salt,
    )
