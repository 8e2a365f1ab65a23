"""Builds requests without vLLM's input processing. Importing this module does not import vLLM."""

import copy
import time
from collections.abc import Collection, Mapping
from typing import Any

TRANSFER_PARAMS = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""Extra arguments with the address of another process with which an engine exchanges a request's caches."""


def build_engine_core_request_from_tokens(
    request_id: str,
    prompt: Mapping[str, Any],
    params: Any,
    arrival_time: float | None = None,
    model_config: Any = None,
    resumable: bool = False,
    mm_features: list[Any] | None = None,
) -> Any:
    """Build an `EngineCoreRequest` for a tokenized and processed prompt, vLLM's `TokensPrompt`. Nothing is checked.

    `params` are copied; `arrival_time` is in wall-clock seconds, None for now; `resumable`: further parts of the prompt
    will follow. Raises ValueError if neither `max_tokens` nor vLLM's `model_config` limits the answer.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    params = params.clone()
    sampling = isinstance(params, SamplingParams)
    token_ids: list[int] = prompt["prompt_token_ids"]
    if sampling and params.max_tokens is None:
        if model_config is None:
            raise ValueError(f"request {request_id}: max_tokens is not set, and there is no model_config to limit it")
        params.max_tokens = model_config.max_model_len - len(token_ids)
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=token_ids,
        mm_features=mm_features,
        sampling_params=params if sampling else None,
        pooling_params=None if sampling else params,
        arrival_time=time.time() if arrival_time is None else arrival_time,
        lora_request=None,
        cache_salt=prompt.get("cache_salt"),
        data_parallel_rank=None,
        prompt_embeds=prompt.get("prompt_embeds"),
        resumable=resumable,
        external_req_id=request_id,
    )


def drop_transfers(request: Any) -> None:
    take_extra_args(request, TRANSFER_PARAMS)


def take_extra_args(request: Any, names: Collection[str]) -> dict[str, Any]:
    """Remove these of a request's `extra_args`, named in lower case here and in any case there; return them by name.

    Its sampling parameters may be shared, so a copy replaces them.
    """
    params = request.sampling_params
    if params is None or not params.extra_args:
        return {}
    taken = {name.lower(): value for name, value in params.extra_args.items() if name.lower() in names}
    if taken:
        request.sampling_params = params = copy.copy(params)
        kept = {name: value for name, value in params.extra_args.items() if name.lower() not in names}
        params.extra_args = kept or None
    return taken
