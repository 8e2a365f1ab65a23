"""`LeapEngine` against the engine that iterates."""

import random
from dataclasses import replace

import pytest
from simulator.engine import LeapEngine
from simulator.requests import Request

from vllm_omni_plugin.sim import EngineModel, EngineSettings, SimRequest

SETTINGS = EngineSettings(
    step_s=0.01,
    prefill_token_s=0.0005,
    sequence_s=0.001,
    max_num_seqs=6,
    max_num_batched_tokens=128,
    kv_blocks=160,
    block_size=4,
    max_model_len=512,
)
Arrivals = list[tuple[float, Request]]
Times = dict[int, tuple[float, float, int]]
"""By request number: first token, last token, cached prompt tokens."""


def iterate(settings: EngineSettings, arrivals: Arrivals) -> Times:
    model = EngineModel(settings)
    pending = [(at, request) for at, request in arrivals]
    first: dict[int, tuple[float, int]] = {}
    times: Times = {}
    wake: float | None = None
    while pending or wake is not None:
        now = min(pending[0][0] if pending else float("inf"), float("inf") if wake is None else wake)
        # An iteration that ends at the moment of an arrival ends before it.
        step = model.step(now)
        for output in step.outputs:
            number = int(output.request_id)
            if output.prefill is not None:
                first[number] = now, output.prefill.cached_tokens
            if output.finish is not None:
                times[number] = (first[number][0], now, first[number][1])
        while pending and pending[0][0] <= now:
            at, request = pending.pop(0)
            model.submit(
                SimRequest(str(request.number), request.tokens[: request.prompt_tokens], request.output_tokens), at
            )
        wake = model.step(now).next_time
    return times


def leap(settings: EngineSettings, arrivals: Arrivals) -> tuple[Times, int]:
    """What the leaping engine does with these requests, and in how many steps."""
    engine = LeapEngine(settings)
    pending = [(at, request) for at, request in arrivals]
    times: Times = {}
    first: dict[int, float] = {}
    steps = 0
    while pending or engine.next_time < float("inf"):
        if pending and pending[0][0] < engine.next_time:
            at, request = pending.pop(0)
            engine.submit(request.job(settings.block_size), at)
            continue
        now = engine.next_time
        outcome = engine.step()
        steps += 1
        for job in outcome.began:
            first[job.request.number] = now
        for job in outcome.ended:
            number = job.request.number
            times[number] = (first[number], now, job.cached_tokens)
    return times, steps


def mixed(seed: int, count: int, rate: float, shared: int = 3) -> Arrivals:
    """Requests with prompts of 5 to 300 tokens; some begin like others."""
    rng = random.Random(seed)
    prefixes = [[rng.randrange(1000) for _ in range(rng.randrange(20, 150))] for _ in range(shared)]
    now, arrivals = 0.0, []
    for number in range(count):
        now += rng.expovariate(rate)
        prompt = rng.choice(prefixes) * rng.randrange(2) + [rng.randrange(1000) for _ in range(rng.randrange(5, 150))]
        answer = [rng.randrange(1000) for _ in range(rng.randrange(1, 60))]
        arrivals.append((now, Request(number, prompt, answer, 60, None)))
    return arrivals


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rate", [0.5, 4.0, 40.0])
def test_leaping_gives_the_times_of_iterating(seed: int, rate: float) -> None:
    settings = replace(SETTINGS, kv_blocks=100_000)
    arrivals = mixed(seed, 60, rate)
    expected = iterate(settings, arrivals)
    found, _ = leap(settings, arrivals)
    assert found.keys() == expected.keys()
    for number, (first, last, cached) in expected.items():
        assert found[number] == (pytest.approx(first, abs=1e-6), pytest.approx(last, abs=1e-6), cached)


@pytest.mark.parametrize("seed", range(5))
def test_leaping_is_within_five_percent_of_iterating_where_kv_memory_is_short(seed: int) -> None:
    arrivals = mixed(seed, 200, 4.0)
    expected = iterate(SETTINGS, arrivals)
    found, _ = leap(SETTINGS, arrivals)
    for place in (0, 1):
        times = [times[place] - arrivals[number][0] for number, times in sorted(expected.items())]
        leapt = [times[place] - arrivals[number][0] for number, times in sorted(found.items())]
        assert sum(leapt) == pytest.approx(sum(times), rel=0.05)
    assert sum(t[2] for t in found.values()) == pytest.approx(sum(t[2] for t in expected.values()), rel=0.05)


def test_an_answer_alone_takes_two_steps_however_long_it_is() -> None:
    arrivals = [(0.0, Request(0, [1] * 8, [2] * 400, 400, None))]
    assert leap(SETTINGS, arrivals)[1] == 2
