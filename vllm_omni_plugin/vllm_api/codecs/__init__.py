"""Codecs of the engine-core protocol for the engine's side, and the filter of messages from heads.

May import `vllm_api.engine_messages`. Start with `stage_protocol`.
"""
