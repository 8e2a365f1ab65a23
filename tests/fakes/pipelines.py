"""Pipelines for tests."""

from tests.fakes.pipeline_fleet import stage

PYTHON = "acme.stages:Any"

CHAIN = (
    stage(0, "thinker", "text", final=True),
    stage(1, "refiner", "text", "thinker", final=True),
)
"""A call gets the answers of both stages; the answer of the refiner goes through vLLM's server."""

SPEECH = (
    stage(0, "thinker", "text", final=True),
    stage(1, "talker", "tokens", "thinker", async_chunk=True, chunk_size=2),
    stage(2, "vocoder", "audio", "talker", engine=PYTHON, async_chunk=True, chunk_size=2, final=True),
)
"""The first stage is the front stage, and the others start while it runs."""

FAN_OUT = (
    stage(0, "thinker", "text", final=True),
    stage(1, "judge", "scores", "thinker", final=True),
    stage(2, "painter", "image", "thinker", engine=PYTHON, final=True),
)

JOIN = (
    stage(0, "thinker", "text"),
    stage(1, "doubter", "text"),
    stage(2, "judge", "text", "thinker", "doubter", final=True),
)

DIAMOND = (
    stage(0, "thinker", "text"),
    stage(1, "left", "text", "thinker"),
    stage(2, "right", "text", "thinker"),
    stage(3, "judge", "text", "left", "right", final=True),
)

DISAGGREGATED = (
    stage(0, "prefill", "kv_cache", model="one", min_prompt_tokens=3),
    stage(1, "decode", "text", "prefill", model="one", transform="kv_transfer", final=True),
)
