"""How vLLM's requests move, on vLLM's own structs."""

from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import RepetitionDetectionParams, SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors, SamplingMaskLists
from vllm.v1.pool.late_interaction import build_late_interaction_doc_params, build_late_interaction_query_params
from vllm.v1.pool.late_interaction_runner import LateInteractionRunner
from vllm.v1.sample.logits_processor import LOGITSPROCS_GROUP

from vllm_omni_plugin.vllm_api.engine_messages import moving
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Move
from vllm_omni_plugin.vllm_api.engine_messages.request_building import build_engine_core_request_from_tokens

PROMPT = [1, 2, 3]
GREEDY: dict[str, Any] = {"temperature": 0.0}
WORDS = [[7], [8, 9]]


def request(bad_words: list[list[int]] | None = None, resumable: bool = False, **params: Any) -> EngineCoreRequest:
    sampling = SamplingParams(**{"max_tokens": 50, **params})
    sampling._bad_words_token_ids = bad_words
    return build_engine_core_request_from_tokens(
        "r", {"prompt_token_ids": list(PROMPT), "cache_salt": "salt"}, sampling, arrival_time=5.0, resumable=resumable
    )


HOW = [
    ({}, Move.RESUME),
    (GREEDY, Move.RESUME),
    ({"seed": 3}, Move.REPLAY),
    (GREEDY | {"seed": 3}, Move.RESUME),
    ({"top_p": 0.5, "top_k": 4, "min_p": 0.1}, Move.RESUME),
    (GREEDY | {"repetition_penalty": 1.3}, Move.RESUME),
    (GREEDY | {"presence_penalty": 1.0}, Move.REPLAY),
    (GREEDY | {"frequency_penalty": -1.0}, Move.REPLAY),
    (GREEDY | {"min_tokens": 9}, Move.RESUME),
    (GREEDY | {"stop": ["x"], "stop_token_ids": [4], "ignore_eos": True}, Move.RESUME),
    (GREEDY | {"bad_words": WORDS[:1]}, Move.RESUME),
    (GREEDY | {"bad_words": WORDS}, Move.REPLAY),
    (GREEDY | {"logprobs": 3, "prompt_logprobs": 2}, Move.RESUME),
    (GREEDY | {"logit_bias": {4: 1.0}, "allowed_token_ids": [4, 5]}, Move.RESUME),
    (GREEDY | {"structured_outputs": StructuredOutputsParams(regex="a+")}, Move.REPLAY),
    (GREEDY | {"thinking_token_budget": 5}, Move.REPLAY),
    (GREEDY | {"repetition_detection": RepetitionDetectionParams(3, 1, 3)}, Move.REPLAY),
    (GREEDY | {"trace_decode_token_ids": [4, 5]}, Move.REPLAY),
    (GREEDY | {"watermarking": True}, Move.REPLAY),
    (GREEDY | {"watermarking": False}, Move.RESUME),
    (GREEDY | {"extra_args": {"of": "a third party"}}, Move.REPLAY),
    (GREEDY | {"extra_args": {"kv_transfer_params": {"do_remote_prefill": True}}}, Move.NEVER),
    (GREEDY | {"extra_args": {"ec_transfer_params": {}}}, Move.NEVER),
]


def make(fields: dict[str, Any]) -> EngineCoreRequest:
    plain = {name: value for name, value in fields.items() if name != "bad_words"}
    return request(bad_words=fields.get("bad_words"), **plain)


@pytest.mark.parametrize(("fields", "move"), HOW, ids=str)
def test_how_a_started_request_moves_depends_on_its_sampling(fields: dict[str, Any], move: Move) -> None:
    assert EngineApi().how_to_move(make(fields)) is move


@pytest.mark.parametrize(
    ("extra_args", "waits"),
    [
        (None, False),
        ({"of": "a third party"}, False),
        ({"kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": False}}, True),
        ({"kv_transfer_params": {"do_remote_prefill": False, "do_remote_decode": True}}, False),
        ({"kv_transfer_params": "of another connector"}, True),
        ({"ec_transfer_params": {}}, True),
    ],
    ids=str,
)
def test_a_request_may_wait_for_a_cache_unless_it_only_sends_its_own(extra_args: Any, waits: bool) -> None:
    assert EngineApi().awaits_cache(request(extra_args=extra_args)) is waits


@pytest.mark.parametrize(
    ("extra_args", "rest"),
    [
        ({"kv_transfer_params": {"do_remote_prefill": True}}, None),
        ({"kv_transfer_params": "of another connector", "mine": 1}, {"mine": 1}),
    ],
    ids=str,
)
def test_a_request_without_its_hand_over_computes_its_prompt(extra_args: Any, rest: Any) -> None:
    made = request(extra_args=extra_args)
    params = EngineApi().without_hand_over(made).sampling_params
    assert (params.extra_args, params.skip_reading_prefix_cache) == (rest, True)
    assert made.sampling_params.extra_args == extra_args


@pytest.mark.parametrize(
    "extra_args", [None, {"kv_transfer_params": {"do_remote_decode": True}}, {"ec_transfer_params": {"a": 1}}], ids=str
)
def test_a_request_that_names_no_cache_stays_as_it_is(extra_args: Any) -> None:
    made = request(extra_args=extra_args)
    assert EngineApi().without_hand_over(made) is made


def test_with_processors_of_a_third_party_every_request_replays() -> None:
    api = EngineApi(custom_processors=True, random=Random(1))
    assert api.how_to_move(request(**GREEDY)) is Move.REPLAY
    assert api.make_movable(request()).sampling_params.seed is not None


def test_embeddings_replay_and_a_session_never_moves() -> None:
    embedded = msgspec.structs.replace(request(**GREEDY), prompt_token_ids=None, prompt_embeds=torch.zeros(2, 4))
    assert EngineApi().how_to_move(embedded) is Move.REPLAY
    assert EngineApi().how_to_move(request(resumable=True)) is Move.NEVER


def test_pooling_requests_never_move_and_a_document_is_pinned_to_the_replica_of_its_query() -> None:
    scoring = PoolingParams(task="token_embed", late_interaction_params=build_late_interaction_doc_params("q"))
    caching = PoolingParams(task="token_embed", late_interaction_params=build_late_interaction_query_params("q", 1))
    for params, move in ((scoring, Move.PINNED), (caching, Move.NEVER), (PoolingParams(task="embed"), Move.NEVER)):
        pooling = build_engine_core_request_from_tokens("r", {"prompt_token_ids": PROMPT}, params)
        assert EngineApi().how_to_move(pooling) is move
        assert EngineApi().make_movable(pooling) is pooling
        assert not EngineApi().awaits_cache(pooling)
        assert EngineApi().end_if_complete(pooling, [], 0) is None


def test_an_engine_cannot_score_a_document_whose_query_it_has_not_seen() -> None:
    params = PoolingParams(task="token_embed", late_interaction_params=build_late_interaction_doc_params("q"))
    with pytest.raises(ValueError, match="query cache miss"):
        LateInteractionRunner().postprocess_pooler_output([torch.zeros(2, 4)], [params], ["d"], [True])


@pytest.mark.parametrize(("fields", "move"), HOW, ids=str)
def test_only_a_request_that_could_not_replay_gets_a_seed(fields: dict[str, Any], move: Move) -> None:
    sampled = make({name: value for name, value in fields.items() if name not in ("temperature", "seed")})
    movable = EngineApi(random=Random(1)).make_movable(sampled)
    if "seed" in fields or move is Move.RESUME:
        assert movable is sampled
    else:
        assert movable.sampling_params.seed is not None
        assert sampled.sampling_params.seed is None
    assert EngineApi().make_movable(make(fields | GREEDY)).sampling_params.seed == fields.get("seed")


@pytest.mark.parametrize("fields", [GREEDY, {"seed": 3}], ids=str)
def test_a_request_that_needs_no_seed_is_not_searched_for_a_reason(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moving, "depends_on_output", lambda request: pytest.fail("it was searched"))
    given = make(fields)
    assert EngineApi().make_movable(given) is given


def test_a_resumed_request_produces_the_rest_and_does_not_change_the_original() -> None:
    original = request(max_tokens=50, min_tokens=10, prompt_logprobs=2, logprobs=1, **GREEDY)
    resumed = EngineApi().continuation(original, Move.RESUME, [4, 5, 6])
    assert resumed.prompt_token_ids == [1, 2, 3, 4, 5, 6]
    params = resumed.sampling_params
    assert (params.max_tokens, params.min_tokens, params.prompt_logprobs, params.logprobs) == (47, 7, None, 1)
    assert not params.skip_reading_prefix_cache
    assert (resumed.arrival_time, resumed.cache_salt) == (5.0, "salt")
    assert original.prompt_token_ids == PROMPT
    params = original.sampling_params
    assert (params.max_tokens, params.min_tokens, params.prompt_logprobs) == (50, 10, 2)


@pytest.mark.parametrize("move", [Move.RESUME, Move.REPLAY])
def test_logprobs_of_chosen_prompt_tokens_are_not_computed_again(move: Move) -> None:
    original = request(**GREEDY)
    original.sampling_params.prompt_logprob_token_ids = [4]
    original.sampling_params.prompt_logprob_start = 1
    original.sampling_params.skip_reading_prefix_cache = True
    params = EngineApi().continuation(original, move, [4]).sampling_params
    assert (params.prompt_logprob_token_ids, params.prompt_logprob_start) == (None, None)
    assert not params.skip_reading_prefix_cache
    assert original.sampling_params.prompt_logprob_token_ids == [4]


def test_a_resumed_request_still_skips_the_prefix_cache_and_min_tokens_is_not_negative() -> None:
    original = request(skip_reading_prefix_cache=True, min_tokens=1, **GREEDY)
    params = EngineApi().continuation(original, Move.RESUME, [4, 5, 6]).sampling_params
    assert (params.skip_reading_prefix_cache, params.min_tokens) == (True, 0)


def test_a_replayed_request_is_the_same_without_prompt_logprobs() -> None:
    original = request(max_tokens=50, min_tokens=10, prompt_logprobs=2, presence_penalty=1.0)
    replayed = EngineApi().continuation(original, Move.REPLAY, [4, 5, 6])
    params = replayed.sampling_params
    assert replayed.prompt_token_ids == PROMPT
    assert (params.max_tokens, params.min_tokens, params.prompt_logprobs) == (50, 10, None)


@pytest.mark.parametrize(
    ("produced", "reason", "stop"),
    [
        ([4, 5], None, None),
        ([4, 9], FinishReason.STOP, 9),
        ([4, 2], FinishReason.STOP, None),
        ([9, 4], None, None),
        ([4, 5, 6], FinishReason.LENGTH, None),
        ([4, 5, 9], FinishReason.STOP, 9),
        ([], None, None),
    ],
)
def test_a_request_with_all_its_tokens_is_ended(
    produced: list[int], reason: FinishReason | None, stop: int | None
) -> None:
    whole = request(max_tokens=3, stop_token_ids=[9])
    whole.sampling_params._eos_token_id = 2
    outputs = EngineApi().end_if_complete(whole, produced, 4)
    if reason is None:
        assert outputs is None
        return
    [output] = outputs.outputs
    assert (outputs.engine_index, output.request_id, output.new_token_ids) == (4, "r", [])
    assert (output.finish_reason, output.stop_reason) == (reason, stop)


def logprobs(tokens: list[int]) -> LogprobsLists:
    column = np.array(tokens)
    return LogprobsLists(column[:, None], -column[:, None].astype(float), column)


def first_output(tokens: list[int], prompt: int = 2) -> EngineCoreOutput:
    return EngineCoreOutput(
        "r",
        tokens,
        new_logprobs=logprobs(tokens),
        new_prompt_logprobs_tensors=LogprobsTensors(torch.zeros(1), torch.zeros(1), torch.zeros(1)),
        prompt_token_id_logprobs=torch.zeros(1),
        events=[EngineCoreEvent(EngineCoreEventType.QUEUED, 1.0)],
        prefill_stats=PrefillStats(prompt),
        routed_experts=np.array([-1] * prompt + tokens),
        new_sampling_mask=SamplingMaskLists(np.array(tokens), np.arange(len(tokens) + 1)),
    )


@pytest.mark.parametrize("repeated", range(4))
def test_repeated_tokens_and_prefill_results_are_removed_from_the_first_output(repeated: int) -> None:
    output, rest = first_output([10, 11, 12]), [10, 11, 12][repeated:]
    moving.trim_repeated(output, repeated)
    assert output.new_token_ids == rest
    assert output.new_logprobs.logprob_token_ids[:, 0].tolist() == rest
    assert output.new_logprobs.sampled_token_ranks.tolist() == rest
    assert output.routed_experts.tolist() == rest
    masks = output.new_sampling_mask and output.new_sampling_mask.to_nested_list()
    assert masks == ([[token] for token in rest] or None)
    assert (output.events, output.prefill_stats) == (None, None)
    assert (output.new_prompt_logprobs_tensors, output.prompt_token_id_logprobs) == (None, None)
    plain = EngineCoreOutput("r", [10, 11, 12])
    moving.trim_repeated(plain, repeated)
    assert plain == EngineCoreOutput("r", rest)


class Config:
    max_model_len = 100
    logits_processors: list[str] | None = None


def test_processors_of_a_third_party_are_found_in_the_configuration_and_among_plugins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = Config()
    assert not moving.has_custom_logits_processors(config)
    config.logits_processors = ["package.module:Processor"]
    assert moving.has_custom_logits_processors(config)
    installed = {LOGITSPROCS_GROUP: ["a plugin"]}
    monkeypatch.setattr(moving, "entry_points", lambda group: installed.get(group, []))
    assert moving.has_custom_logits_processors(Config())


def test_a_built_request_owns_its_parameters_and_is_bounded() -> None:
    params = SamplingParams(max_tokens=None)
    built = build_engine_core_request_from_tokens("r", {"prompt_token_ids": PROMPT}, params, model_config=Config())
    assert (built.sampling_params.max_tokens, params.max_tokens) == (97, None)
    assert (built.external_req_id, built.resumable, built.pooling_params) == ("r", False, None)
    with pytest.raises(ValueError, match="request r: max_tokens is not set"):
        build_engine_core_request_from_tokens("r", {"prompt_token_ids": PROMPT}, params)
