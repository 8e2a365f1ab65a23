"""Building requests without vLLM's input processing. Importing this imports nothing of vLLM."""

import copy
import time
from collections.abc import Mapping
from typing import Any

TRANSFER_PARAMS = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""Extra arguments by which an engine gets a request's caches from another process, or leaves them for one: they say at
which address."""


def build_engine_core_request_from_tokens(
    request_id: str,
    prompt: Mapping[str, Any],
    params: Any,
    arrival_time: float | None = None,
    model_config: Any = None,
    resumable: bool = False,
    mm_features: list[Any] | None = None,
) -> Any:
    """An `EngineCoreRequest` for a prompt that has been tokenized and processed already; nothing of it is checked.

    Args:
        request_id: its id, for engines and for its client alike.
        prompt: vLLM's `TokensPrompt`: `prompt_token_ids`, and `prompt_embeds` and `cache_salt` if there are any.
        params: `SamplingParams` or `PoolingParams`; copied.
        arrival_time: wall-clock seconds since the epoch, None for now.
        model_config: vLLM's; bounds the tokens of an answer whose parameters do not.
        resumable: more of the prompt is to come.
        mm_features: processed multimodal inputs, as vLLM's input processor leaves them.

    Raises:
        ValueError: nothing bounds the length of the answer.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    params = params.clone()
    sampling = isinstance(params, SamplingParams)
    token_ids: list[int] = prompt["prompt_token_ids"]
    if sampling and params.max_tokens is None:
        if model_config is None:
            raise ValueError(f"request {request_id}: max_tokens is not set, and no model_config says what bounds it")
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
    """Take `TRANSFER_PARAMS` out of an `EngineCoreRequest`. Its parameters, which others may have too, are replaced."""
    params = request.sampling_params
    if params is None or not params.extra_args or TRANSFER_PARAMS.isdisjoint(params.extra_args):
        return
    request.sampling_params = params = copy.copy(params)
    kept = {name: value for name, value in params.extra_args.items() if name not in TRANSFER_PARAMS}
    params.extra_args = kept or None
