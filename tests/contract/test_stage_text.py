"""Reading the outputs of a stage's engine."""

from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import PrefillStats

from vllm_omni_plugin.pipeline import Modality
from vllm_omni_plugin.vllm_api.vllm_stages.stage_requests import VllmStageApi

from .stage_models import api, config, model, source

RED, GREEN, BLUE, STOP, END = 3, 4, 5, 8, 0


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return config(model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def text(own: Any) -> VllmStageApi:
    return api(own)


def out(*tokens: int, reason: FinishReason | None = None, **fields: Any) -> EngineCoreOutput:
    return EngineCoreOutput(request_id="r-1", new_token_ids=list(tokens), finish_reason=reason, **fields)


def sampled(**params: Any) -> Any:
    return source(params=SamplingParams(max_tokens=5, **params))


def test_text_comes_in_pieces_that_make_the_whole(text: VllmStageApi) -> None:
    reader = text.reader(sampled())
    first = reader.read(out(RED), ended=False)
    last = reader.read(out(GREEN, BLUE, reason=FinishReason.LENGTH), ended=True)
    assert (first.text, list(first.token_ids), first.finish_reason) == (" red", [RED], None)
    assert (last.text, list(last.token_ids), last.finish_reason) == (" green blue", [GREEN, BLUE], "length")
    whole = reader.whole
    assert (whole.text, list(whole.token_ids), whole.finish_reason) == (" red green blue", [RED, GREEN, BLUE], "length")


@pytest.mark.parametrize(("wanted", "said", "tokens"), [(False, " red", [RED]), (True, " red stop", [RED, STOP])])
def test_the_token_that_ends_an_answer_is_part_of_it_only_where_the_request_wants_it(
    text: VllmStageApi, wanted: bool, said: str, tokens: list[int]
) -> None:
    reader = text.reader(sampled(stop_token_ids=[STOP], include_stop_str_in_output=wanted))
    read = reader.read(out(RED, STOP, reason=FinishReason.STOP, stop_reason=STOP), ended=True)
    assert (read.text, list(read.token_ids), read.finish_reason) == (said, tokens, "stop")


def test_a_stop_string_ends_the_text_before_the_engine_does(text: VllmStageApi) -> None:
    reader = text.reader(sampled(stop=["green"]))
    held_back = reader.read(out(RED), ended=False)
    read = reader.read(out(GREEN, BLUE), ended=False)
    assert (held_back.text + read.text, read.finish_reason) == (" red ", "stop")
    assert list(reader.whole.token_ids) == [RED, GREEN]


def test_a_stop_string_that_comes_with_the_engines_end_keeps_its_token(text: VllmStageApi) -> None:
    reader = text.reader(sampled(stop=["green"]))
    read = reader.read(out(RED, GREEN, END, reason=FinishReason.STOP), ended=True)
    assert (read.text, list(read.token_ids), read.finish_reason) == (" red ", [RED, GREEN], "stop")


def test_a_possible_start_of_a_stop_string_is_held_back_until_the_end(text: VllmStageApi) -> None:
    reader = text.reader(sampled(stop=["green blue"]))
    assert reader.read(out(GREEN), ended=False).text == ""
    assert reader.read(out(RED, reason=FinishReason.LENGTH), ended=True).text == " green red"


def test_the_end_of_a_turn_does_not_end_the_session(text: VllmStageApi) -> None:
    reader = text.reader(sampled())
    turn = reader.read(out(RED, END, reason=FinishReason.STOP), ended=False)
    end = reader.read(out(GREEN, reason=FinishReason.LENGTH), ended=True)
    assert (turn.finish_reason, list(turn.token_ids), end.finish_reason) == (None, [RED], "length")
    assert reader.whole.text == " red green"


def test_an_output_without_tokens_may_end_an_answer(text: VllmStageApi, own: Any) -> None:
    for stage_api in (text, api(own, output=Modality.TOKENS)):
        reader = stage_api.reader(sampled())
        reader.read(out(RED), ended=False)
        read = reader.read(out(reason=FinishReason.STOP), ended=True)
        assert (read.text, list(read.token_ids), read.finish_reason) == ("", [], "stop")
        assert list(reader.whole.token_ids) == [RED]


def test_cached_tokens_and_transfer_params_are_metadata(text: VllmStageApi) -> None:
    stats = PrefillStats()
    stats.set(num_prompt_tokens=3, num_local_cached_tokens=1, num_external_cached_tokens=1)
    reader = text.reader(sampled())
    reader.read(out(RED, prefill_stats=stats), ended=False)
    reader.read(out(reason=FinishReason.LENGTH, kv_transfer_params={"remote_port": 7}), ended=True)
    assert reader.whole.metadata == {"cached_tokens": 2, "kv_transfer_params": {"remote_port": 7}}
