"""The engine-core protocol from the engine's side, and what a head may send.

May import `vllm_api.requests`. Start with `stage_protocol`.
"""
