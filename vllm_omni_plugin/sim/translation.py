"""Between vLLM's structs and the model's own."""

from collections.abc import Sequence
from typing import Any

from vllm_omni_plugin.sim.model.engine_model import LoadReport
from vllm_omni_plugin.sim.model.sim_requests import Prefill, SimOutput, SimRequest
from vllm_omni_plugin.vllm_api.protocol import sim_protocol


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


def to_engine_output(output: SimOutput) -> Any:
    """The `EngineCoreOutput` of a step of an answer."""
    tokens: Sequence[int] = () if output.token is None else (output.token,)
    prefill = None if output.prefill is None else _prefill_fields(output.prefill)
    return sim_protocol.output(output.request_id, tokens, output.finish, output.stop_token, prefill)


def _prefill_fields(prefill: Prefill) -> dict[str, Any]:
    return sim_protocol.prefill_fields(
        prefill.queued_at, prefill.scheduled_at, prefill.prompt_tokens, prefill.cached_tokens
    )


def to_scheduler_stats(report: LoadReport) -> Any:
    """The `SchedulerStats` of a report."""
    return sim_protocol.scheduler_stats(
        report.running,
        report.waiting,
        report.kv_cache_usage,
        report.admitted,
        report.queried_tokens,
        report.cached_tokens,
    )
