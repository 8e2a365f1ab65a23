"""Simulated engines give the same tokens in any batch and on any engine."""

from dataclasses import replace

import pytest

from tests.sim.drive import SETTINGS, answer, request, run, tokens_of
from vllm_omni_plugin.sim import EngineModel, SimOutput


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
