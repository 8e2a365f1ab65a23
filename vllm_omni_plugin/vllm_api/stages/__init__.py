"""The stages of a pipeline in vLLM's terms: prompts, parameters, texts, and the protocol of Python stages.

May import `pipeline` and `vllm_api.requests`. Start with `stage_requests`.
"""
