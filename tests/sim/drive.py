"""Runs the model in simulated time."""

from collections.abc import Iterable

from vllm_omni_plugin.sim import EngineModel, EngineSettings, SimOutput, SimRequest

SETTINGS = EngineSettings(
    step_s=1.0,
    prefill_token_s=0.01,
    sequence_s=0.1,
    max_num_seqs=4,
    max_num_batched_tokens=32,
    kv_blocks=32,
    block_size=4,
    max_model_len=64,
    vocabulary_size=1000,
)
"""Round numbers: 1 s per iteration, 10 ms per prompt token, 0.1 s per decoding sequence."""


def request(request_id: str, prompt: Iterable[int] | int = 8, max_tokens: int | None = 4, **rest: object) -> SimRequest:
    """A request; a number makes a prompt of that length, different from all other lengths."""
    tokens = [prompt * 100 + position for position in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return SimRequest(request_id, tokens, max_tokens, **rest)  # type: ignore[arg-type]


def run(model: EngineModel, now: float = 0.0, until: float = float("inf")) -> list[tuple[float, SimOutput]]:
    """Step until no step is due, or until a time; returns each output with its time."""
    timeline: list[tuple[float, SimOutput]] = []
    while True:
        step = model.step(now)
        timeline += [(now, output) for output in step.outputs]
        if step.next_time is None or step.next_time > until:
            return timeline
        now = step.next_time


def tokens_of(timeline: Iterable[tuple[float, SimOutput]], request_id: str) -> list[int]:
    return [output.token for _, output in timeline if output.request_id == request_id and output.token is not None]


def answer(asked: SimRequest, settings: EngineSettings = SETTINGS) -> list[int]:
    model = EngineModel(settings)
    model.submit(asked, 0.0)
    return tokens_of(run(model), asked.request_id)
