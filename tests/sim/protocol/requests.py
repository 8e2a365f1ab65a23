"""Requests as vLLM's front end makes them."""

from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest

from tests.sim.drive import request as sim_request

LONG = 50
"""Tokens of an answer that is still running when something happens to it."""


def request(request_id: str = "a", prompt: int = 8, **params: Any) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=list(sim_request("", prompt).prompt),
        mm_features=None,
        sampling_params=SamplingParams(**({"max_tokens": 4} | params)),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
