"""The engine-core protocol from the engine's side, and the filter of messages from heads.

May import `vllm_api.requests`. Start with `stage_protocol`.
"""
