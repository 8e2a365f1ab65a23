"""The model of an engine in simulated time: durations, batches, cache hits, and the same tokens in any batch."""

from dataclasses import replace

import pytest

from tests.sim.drive import SETTINGS, answer, request, run, tokens_of
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.sim import EngineModel, EngineSettings, Prefill, SimOutput, SimRequest


def submitted(*requests: SimRequest, settings: EngineSettings = SETTINGS) -> EngineModel:
    model = EngineModel(settings)
    for each in requests:
        model.submit(each, 0.0)
    return model


def times(model: EngineModel, request_id: str) -> list[float]:
    return [round(now, 6) for now, output in run(model) if output.request_id == request_id]


@pytest.mark.parametrize(
    ("requests", "batched_tokens", "expected"),
    [
        pytest.param([request("a", 8, 3)], 32, [1.08, 2.18, 3.28], id="prompt tokens, then one iteration per token"),
        pytest.param([request("a", 8, 3), request("b", 9, 3)], 32, [1.17, 2.37, 3.57], id="decoded together"),
        pytest.param([request("a", 40, 2)], 16, [3.40, 4.50], id="a long prompt in chunks"),
    ],
)
def test_times_of_tokens(requests: list[SimRequest], batched_tokens: int, expected: list[float]) -> None:
    model = submitted(*requests, settings=replace(SETTINGS, max_num_batched_tokens=batched_tokens))
    assert times(model, "a") == expected


def test_running_sequences_come_before_the_prompts_of_others() -> None:
    model = submitted(request("a", 8, 4), settings=replace(SETTINGS, max_num_batched_tokens=8))
    first = model.step(0.0)
    assert first.next_time == pytest.approx(1.08)
    model.submit(request("b", 9, 1), 0.5)
    timeline = run(model, now=1.08)
    assert [round(now, 6) for now, output in timeline if output.request_id == "a"] == [1.08, 2.25, 3.37, 4.47]
    assert [round(now, 6) for now, output in timeline if output.request_id == "b"] == [3.37]


def test_requests_beyond_the_number_of_sequences_wait_in_order() -> None:
    model = submitted(*(request(str(number), 4, 2) for number in range(6)))
    timeline = run(model)
    ends = [output.request_id for _, output in timeline if output.finish]
    assert ends == ["0", "1", "2", "3", "4", "5"]
    assert {output.request_id for now, output in timeline if now < 2} == {"0", "1", "2", "3"}


def test_requests_wait_for_kv_memory_in_order() -> None:
    # Of 16 blocks the first takes 12, the second needs 10, the third would fit beside the first.
    model = submitted(
        request("a", 40, 8), request("b", 30, 8), request("c", 4, 1), settings=replace(SETTINGS, kv_blocks=16)
    )
    timeline = run(model)
    ended = {output.request_id: now for now, output in timeline if output.finish}
    scheduled = {output.request_id: output.prefill.scheduled_at for _, output in timeline if output.prefill}
    assert scheduled == {"a": 0.0, "b": ended["a"], "c": ended["a"]}


def test_an_abort_ends_a_running_and_a_waiting_request_without_an_output() -> None:
    model = submitted(*(request(str(number), 4, 50) for number in range(5)))
    model.step(0.0)
    model.abort(["0", "4", "unknown"])
    timeline = run(model)
    assert {output.request_id for _, output in timeline} == {"1", "2", "3"}


def test_memory_too_small_for_one_request_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"15 KV blocks of 4 tokens cannot hold .* length 64: give at least 16"):
        replace(SETTINGS, kv_blocks=15)


def test_a_paused_engine_finishes_what_runs_and_admits_nothing() -> None:
    model = submitted(request("a", 8, 3))
    model.step(0.0)
    model.admitting = False
    model.submit(request("b", 8, 1), 0.5)
    assert {output.request_id for _, output in run(model, now=0.5)} == {"a"}
    assert (model.busy, model.request_ids) == (False, ["b"])
    model.admitting = True
    assert len(tokens_of(run(model, now=9.0), "b")) == 1


@pytest.mark.parametrize(
    ("prompt", "caching", "cached", "end"),
    [
        pytest.param(17, True, 16, 11.01, id="complete blocks"),
        pytest.param(16, True, 12, 11.04, id="at least one token is computed"),
        pytest.param(17, False, 0, 11.17, id="prefix caching is off"),
    ],
)
def test_a_repeated_prompt_is_taken_from_the_cache(prompt: int, caching: bool, cached: int, end: float) -> None:
    model = submitted(request("a", prompt, 1), settings=replace(SETTINGS, prefix_caching=caching))
    run(model)
    model.submit(request("b", prompt, 1), 10.0)
    ((now, output),) = run(model, now=10.0)
    assert output.prefill == Prefill(10.0, 10.0, prompt, cached)
    assert now == pytest.approx(end)


def test_a_report_comes_with_each_iteration_and_counts_since_the_last() -> None:
    model = submitted(*(request(str(number), 4, 2) for number in range(5)))
    assert model.step(0.0).report is None
    first, second = model.step(1.16).report, model.step(9.0).report
    assert first is not None
    assert second is not None
    assert (first.running, first.waiting, first.admitted, first.queried_tokens) == (4, 1, 4, 16)
    assert (second.running, second.waiting, second.admitted, second.queried_tokens) == (0, 1, 0, 0)
    assert first.kv_cache_usage > second.kv_cache_usage == 0.0


def test_an_answer_is_the_same_among_others_and_on_a_slower_engine() -> None:
    alone = answer(request("a", max_tokens=20))
    crowded = EngineModel(replace(SETTINGS, max_num_batched_tokens=5, step_s=7.0))
    for number in range(3):
        crowded.submit(request(f"other-{number}", 10 + number, 20), 0.0)
    crowded.submit(request("a", max_tokens=20), 0.0)
    assert tokens_of(run(crowded), "a") == alone
    assert len(set(alone)) > 10


@pytest.mark.parametrize("cut", [1, 3, 4, 7, 19])
def test_a_resumed_answer_is_the_same(cut: int) -> None:
    first = request("a", max_tokens=20)
    whole = answer(first)
    resumed = request("b", [*first.prompt, *whole[:cut]], max_tokens=20 - cut)
    assert whole[:cut] + answer(resumed) == whole


def test_weights_and_adapters_change_the_answer_and_cache_salts_do_not() -> None:
    plain = answer(request("a"))
    assert answer(request("a", cache_salt="private")) == plain
    assert answer(request("a", lora_id=1)) != plain
    assert answer(request("a"), replace(SETTINGS, seed=1)) != plain
    assert answer(request("a"), replace(SETTINGS, prefix_caching=False)) == plain


def outputs(asked: object) -> list[SimOutput]:
    model = EngineModel(SETTINGS)
    model.submit(asked, 0.0)  # type: ignore[arg-type]
    return [output for _, output in run(model)]


def test_a_stop_token_ends_the_answer_and_is_named() -> None:
    whole = answer(request("a", max_tokens=8))
    found = outputs(request("a", max_tokens=8, stop_token_ids=frozenset({whole[2]})))
    assert [output.token for output in found] == whole[:3]
    assert (found[-1].finish, found[-1].stop_token) == ("stop", whole[2])


def test_the_end_of_sequence_token_never_comes_by_chance() -> None:
    whole = answer(request("a", max_tokens=8))
    found = outputs(request("a", max_tokens=8, eos_token_id=whole[2]))
    assert [output.token for output in found[:3]] != whole[:3]
    assert [output.finish for output in found] == [None] * 7 + ["length"]
