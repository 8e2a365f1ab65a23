"""Stages that vLLM's engines run: prompts, sampling parameters, requests and texts.

May import `pipeline` and `vllm_api.engine_messages`. Start with `stage_requests`.
"""
