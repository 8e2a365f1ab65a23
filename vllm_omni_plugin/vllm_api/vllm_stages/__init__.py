"""Stages that vLLM's engines run: prompts, sampling parameters, requests and texts. Start with `stage_requests`."""
