"""The requests of stages, made by vLLM's input processing from the outputs of other stages."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request

from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.pipeline import Modality, StageInput
from vllm_omni_plugin.pipeline.transfer import WHOLE, InputPart
from vllm_omni_plugin.vllm_api.vllm_stages.stage_requests import VllmStageApi

from .stage_models import CONTEXT, REVERSED, api, config, model, source

CHUNK = InputPart(resumable=True, last=False)
RED_BLUE = StageInput(text="red blue")


@pytest.fixture(scope="module")
def own(folder: Path) -> Any:
    return config(model(folder / "own"))


@pytest.fixture(scope="module")
def other(folder: Path) -> Any:
    """A model with the same words under other ids."""
    return config(model(folder / "other", REVERSED))


@pytest.fixture(scope="module")
def embedding(folder: Path, own: Any) -> Any:
    return config(folder / "own", enable_prompt_embeds=True)


def refused(
    stage_api: VllmStageApi, given: StageInput, sampling: dict[str, Any] | None = None, part: InputPart = WHOLE
) -> str:
    with pytest.raises(StageInputError) as raised:
        stage_api.build(source(), given, sampling or {}, for_client=False, part=part)
    return str(raised.value)


def test_priority_salt_session_and_trace_headers_are_copied(own: Any, other: Any) -> None:
    fields: dict[str, Any] = {
        "priority": 3,
        "cache_salt": "salt",
        "session_id": "session",
        "trace_headers": {"traceparent": "00-1"},
    }
    client = source(lora_request=LoRARequest("a", 1, "/a"), mm_features=[], **fields)
    for given in (RED_BLUE, StageInput(token_ids=[3])):
        request = api(other, own).build(client, given, {}, for_client=False)
        assert {name: getattr(request, name) for name in fields} == fields
        assert (request.request_id, request.external_req_id, request.arrival_time) == ("r-1", "r", 7.5)
        # They are of another model.
        assert request.lora_request is None
        assert request.mm_features is None


def test_a_limit_is_bounded_by_the_context_that_the_prompt_leaves(own: Any) -> None:
    stage_api = api(own, sampling={"max_tokens": 20, "min_tokens": 15})
    params = stage_api.build(source(), StageInput(token_ids=[3] * 30), {}, for_client=False).sampling_params
    assert (params.max_tokens, params.min_tokens) == (2, 2)
    # Not for the next request.
    params = stage_api.build(source(), StageInput(token_ids=[3]), {}, for_client=False).sampling_params
    assert (params.max_tokens, params.min_tokens) == (20, 15)
    longest = stage_api.build(source(), StageInput(token_ids=[3] * 31), {}, for_client=False)
    assert longest.sampling_params.max_tokens == 1


@pytest.mark.usefixtures("own")
def test_a_longer_context_found_when_engines_start_is_used(folder: Path) -> None:
    stage_config = config(folder / "own")
    stage_api = api(stage_config)
    stage_config.model_config.max_model_len = 16
    assert "at most 15" in refused(stage_api, StageInput(token_ids=[3] * 16))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (StageInput(token_ids=[3] * 32), "the input has 32 tokens and its model takes at most 31"),
        (StageInput(text="red " * 100), "the input has 101 tokens and its model takes at most 31"),
        (StageInput(token_ids=[3, 999]), "Token id 999 is out of vocabulary"),
        (StageInput(), "it takes one of token_ids, text and tensor, and was given neither"),
        (StageInput(token_ids=[3], text="red"), "it takes one of token_ids, text and tensor, and was given token_ids "),
        (StageInput(tensor=torch.zeros(2, 32)), "its engine takes no embeddings: add 'enable-prompt-embeds: true'"),
        (StageInput(token_ids=[3], sampling={"temprature": 1}), "unknown parameter 'temprature': did you mean 'temper"),
        (StageInput(token_ids=[3], sampling={"top_p": 2.0}), "top_p must be in (0, 1], got 2.0"),
        (StageInput(token_ids=[3], sampling={"max_tokens": "many"}), "Expected `int | null`, got `str`"),
        (StageInput(token_ids=[3], sampling={"stop_token_ids": [999]}), "token_id(s) [999] in stop_token_ids contain"),
        (StageInput(token_ids=[3], sampling={"seed": 2**63}), "'seed' has more than 64 bits"),
        (StageInput(token_ids=[3], sampling={"n": 2}), "unknown parameter 'n': use presence_penalty, "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_inputs_that_the_stage_does_not_accept_are_refused_with_its_name(
    own: Any, given: StageInput, message: str
) -> None:
    assert refused(api(own), given).startswith(f"Stage 'refiner': {message}")


def test_embeddings_take_the_place_of_a_prompt(embedding: Any) -> None:
    rows = torch.ones(3, 32, requires_grad=True)
    request = api(embedding).build(source(cache_salt="salt"), StageInput(tensor=rows), {}, for_client=False)
    assert request.prompt_token_ids is None
    assert torch.equal(request.prompt_embeds, torch.ones(3, 32))
    assert (request.cache_salt, request.sampling_params.max_tokens) == ("salt", CONTEXT - 3)


@pytest.mark.parametrize("rows", [torch.zeros(3, 8), torch.zeros(32), torch.zeros(3, 32, dtype=torch.int64)], ids=str)
def test_embeddings_of_another_shape_or_kind_or_in_chunks_are_refused(embedding: Any, rows: torch.Tensor) -> None:
    message = "Stage 'refiner': it takes embeddings as floats of the shape [tokens, 32], not torch."
    assert refused(api(embedding), StageInput(tensor=rows)).startswith(message)
    chunked = refused(api(embedding), StageInput(tensor=torch.zeros(1, 32)), part=CHUNK)
    assert "does not take embeddings" in chunked


def test_sampling_of_the_request_overrides_the_transform_which_overrides_the_file(own: Any) -> None:
    stage_api = api(own, sampling={"temperature": 0.1, "top_k": 1, "max_tokens": 1, "seed": 1})
    given = StageInput(token_ids=[3], sampling={"top_k": 2, "max_tokens": 2})
    params = stage_api.build(source(), given, {"max_tokens": 3}, for_client=False).sampling_params
    assert (params.temperature, params.top_k, params.max_tokens, params.seed) == (0.1, 2, 3, 1)
    # The next request is none the wiser.
    params = stage_api.build(source(), StageInput(token_ids=[3]), {}, for_client=False).sampling_params
    assert (params.top_k, params.max_tokens) == (1, 1)


def test_a_session_is_built_of_chunks_and_an_end(own: Any) -> None:
    stage_api = api(own, sampling={"max_tokens": 6}, inputs=("thinker",), async_chunk=True)
    first = stage_api.build(source(), StageInput(token_ids=[3, 4]), {}, for_client=False, part=CHUNK)
    later = CHUNK._replace(tokens_before=8)
    second = stage_api.build(source(), StageInput(token_ids=[5]), {}, for_client=False, part=later)
    assert [(chunk.resumable, chunk.sampling_params.max_tokens) for chunk in (first, second)] == [(True, 6)] * 2
    assert [stage_api.session_tokens(chunk) for chunk in (first, second)] == [8, 7]
    end = stage_api.build_end(source())
    assert (end.resumable, end.request_id, end.external_req_id) == (False, "r-1", "r")


@pytest.mark.parametrize(("sampling", "seed"), [({}, None), ({"seed": 3}, 3), ({"temperature": 0.0}, None)], ids=str)
def test_a_chunk_that_samples_has_a_seed_since_its_session_may_be_replayed(
    own: Any, sampling: dict[str, Any], seed: int | None
) -> None:
    stage_api = api(own, sampling={"max_tokens": 6, **sampling}, inputs=("thinker",), async_chunk=True)
    given = StageInput(token_ids=[3, 4])
    chunks = [stage_api.build(source(), given, {}, for_client=client, part=CHUNK) for client in (False, True)]
    seeds = [chunk.sampling_params.seed for chunk in chunks]
    assert seeds[0] == seed if sampling else seeds[0] is not None
    # The client samples with its own parameters.
    assert seeds[1] is not None
    assert stage_api.build(source(), given, {}, for_client=False).sampling_params.seed == seed


def test_a_chunk_is_limited_to_the_context_that_its_session_leaves(own: Any) -> None:
    stage_api = api(own, sampling={"max_tokens": 6}, inputs=("thinker",), async_chunk=True)
    later = CHUNK._replace(tokens_before=26)
    chunk = stage_api.build(source(), StageInput(token_ids=[5] * 4), {}, for_client=False, part=later)
    assert chunk.sampling_params.max_tokens == 2
    message = refused(stage_api, StageInput(token_ids=[5] * 4), part=InputPart(resumable=True, tokens_before=28))
    assert message.endswith("the input has 4 tokens, after 28 of its session, and its model takes at most 3")


def test_the_entry_answers_the_clients_request_itself(own: Any) -> None:
    client = source()
    assert api(own, sampling={"temperature": 0.0}).build_root(client, {}, for_client=True) is client


def test_an_entry_that_does_not_answer_samples_by_the_file(folder: Path) -> None:
    with_lora = config(folder / "own", enable_lora=True)
    adapter = LoRARequest("a", 1, "/a")
    client = source(params=SamplingParams(max_tokens=5, temperature=0.9), lora_request=adapter, cache_salt="salt")
    request = api(with_lora, sampling={"max_tokens": 2}).build_root(client, {"temperature": 0.3}, for_client=False)
    params = request.sampling_params
    assert (params.max_tokens, params.temperature) == (2, 0.3)
    expected = msgspec.structs.replace(client, sampling_params=params)
    assert request == expected
    assert request.lora_request is adapter
    assert client.sampling_params.max_tokens == 5


def test_another_model_without_inputs_gets_the_prompts_text(own: Any, other: Any) -> None:
    request = api(other, own).build_root(source([1, 3, 5, 0]), {}, for_client=False)
    assert request.prompt_token_ids == [1, 8, 6]


def test_only_stages_with_the_model_of_the_entry_get_images(folder: Path, own: Any, other: Any) -> None:
    features: list[Any] = [object()]
    client = source(mm_features=features)
    decode = api(config(folder / "own"), own, inputs=("prefill",))
    for request in (
        api(own).build_root(client, {}, for_client=False),
        api(own, output=Modality.KV_CACHE).build_root(client, {}, for_client=False),
        decode.with_kv_transfer(decode.build_root(client, {}, for_client=True), {"remote": 1}),
    ):
        assert request.mm_features is features
    assert api(other, own).build_root(client, {}, for_client=False).mm_features is None


def test_a_prefill_that_is_longer_than_its_context_cannot_be_built(folder: Path, own: Any) -> None:
    short = api(config(folder / "own", max_model_len=16), own, output=Modality.KV_CACHE)
    with pytest.raises(StageInputError, match="the input has 16 tokens and its model takes at most 15"):
        short.build_root(source([3] * 16), {}, for_client=False)


def test_a_prefill_computes_one_token_for_another_engine(own: Any) -> None:
    client = source(params=SamplingParams(max_tokens=5, stop="red", logprobs=2, seed=3), session_id="s")
    request = api(own, output=Modality.KV_CACHE).build_root(client, {}, for_client=False)
    params = request.sampling_params
    assert (params.max_tokens, params.temperature, params.ignore_eos) == (1, 0, True)
    assert (params.stop, params.logprobs) == ([], None)
    # A request that ends at such a token would not keep its cache.
    assert (params.eos_token_id, params.stop_token_ids) == (None, [])
    assert params.extra_args["kv_transfer_params"] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "remote_engine_id": None,
        "remote_block_ids": None,
        "remote_host": None,
        "remote_port": None,
    }
    assert (request.prompt_token_ids, request.session_id) == ([1, 3, 4], "s")


@pytest.mark.parametrize(("options", "expected"), [({}, 30), ({"kv_lease_duration": 8}, 8)])
def test_a_cache_must_be_asked_for_within_half_the_time_for_which_nixl_keeps_it(
    folder: Path, own: Any, options: dict[str, int], expected: int
) -> None:
    transfers = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both", kv_connector_extra_config=options)
    prefill = config(folder / "own", kv_transfer_config=transfers)
    scheduler: Any = SimpleNamespace()
    with pytest.raises(AttributeError):
        # It reads more of a real configuration of a KV cache.
        NixlBaseConnectorScheduler.__init__(scheduler, prefill, "engine", None)
    assert scheduler._kv_lease_duration == expected
    assert api(own).cache_lease_s == 15
    assert api(prefill).cache_lease_s == expected / 2


def test_a_decode_request_has_the_transfer_params_of_the_prefill(folder: Path, own: Any) -> None:
    decode = api(config(folder / "own"), own, inputs=("prefill",))
    client = source(params=SamplingParams(max_tokens=5, extra_args={"a": 1}))
    built = decode.build_root(client, {}, for_client=True)
    request = decode.with_kv_transfer(built, {"do_remote_prefill": True, "remote_block_ids": [1]})
    assert request.sampling_params.extra_args == {
        "a": 1,
        "kv_transfer_params": {"do_remote_prefill": True, "remote_block_ids": [1]},
    }
    assert (request.prompt_token_ids, request.sampling_params.max_tokens) == ([1, 3, 4], 5)
    assert client.sampling_params.extra_args == {"a": 1}
    assert built.sampling_params.extra_args == {"a": 1}
    computed = decode.without_cache(built)
    assert (computed.sampling_params.skip_reading_prefix_cache, built.sampling_params.skip_reading_prefix_cache) == (
        True,
        False,
    )
    silent = decode.build_root(client, {"max_tokens": 2}, for_client=False)
    assert (silent.sampling_params.max_tokens, silent.sampling_params.extra_args) == (2, None)


def test_a_decodes_engine_has_a_cache_freed_that_nobody_will_fetch(own: Any) -> None:
    params = {"do_remote_prefill": True, "remote_host": "10.0.0.1", "remote_block_ids": [[1, 2]]}
    request = api(own, own).release("r-1", params)
    assert (request.abort_immediately, request.prompt_token_ids) == (True, [0])
    scheduler = SimpleNamespace(_stop_heartbeat=lambda request_id: None, _reqs_need_recv={})
    ended = Request.from_engine_core_request(request, None)
    assert NixlPullConnectorScheduler.request_finished(scheduler, ended, ()) == (False, None)
    # Its worker tells the prefill's engine that nothing of these blocks is needed.
    assert scheduler._reqs_need_recv[request.request_id][1] == []
    assert api(own, own).release("r-1", {"do_remote_prefill": False}) is None
