"""The stages of a pipeline in vLLM's terms: prompts, sampling parameters, requests and texts.

May import `pipeline` and `vllm_api.requests`. Start with `stage_requests`.
"""
