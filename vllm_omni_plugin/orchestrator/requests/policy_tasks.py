"""Requests in the words of policies."""

from typing import Any

from vllm_omni_plugin.balancing import MediaSpan, Prompt, Task
from vllm_omni_plugin.vllm_api.requests.facts import RequestFacts


def make_task(request: Any, facts: RequestFacts) -> Task:
    """What a policy is told of a request.

    Args:
        request: vLLM's `EngineCoreRequest`.
        facts: what `RequestApi.describe` says of it.
    """
    media = tuple(MediaSpan(*span) for span in facts.media)
    return {
        "request_id": request.request_id,
        "engine_inputs": request,
        "sampling_params": request.sampling_params,
        "prompt": Prompt(facts.token_ids, facts.lora_name, facts.cache_salt, media, facts.cacheable),
        "session": facts.session,
        "max_tokens": facts.max_tokens,
    }
