"""The requests of vLLM's Rust front end: what a codec that keeps sampling parameters makes of them."""

from typing import Any

import msgspec
import pytest
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.vllm_api.codecs.front_end_codec import FrontEndCodec
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Move
from vllm_omni_plugin.vllm_api.engine_messages.request_building import take_extra_args

PARAMETERS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=32),
    "seeded": SamplingParams(temperature=0.7, seed=7, max_tokens=32),
    "penalties": SamplingParams(presence_penalty=0.5, stop=["."], logit_bias={3: 1.5}, bad_words=["bad"]),
    "logprobs": SamplingParams(logprobs=2, prompt_logprobs=1),
    "structured": SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"})),
    "custom": SamplingParams(extra_args={"tenant": "a"}),
    "none": None,
}


def frames(request_id: str, params: Any) -> list[Any]:
    request = EngineCoreRequest(request_id, [1, 2, 3], None, params, None, 1.5, None, None, None, session_id="s")
    return [EngineCoreRequestType.ADD.value, *MsgpackEncoder().encode(request)]


def decoded(codec: FrontEndCodec, message: list[Any]) -> Any:
    kind, request = codec.decode(message)
    assert kind == "add"
    codec.read_params(request)
    return request


def fields(request: Any) -> dict[str, Any]:
    return {name: getattr(request, name) for name in EngineCoreRequest.__struct_fields__}


@pytest.mark.parametrize("params", PARAMETERS.values(), ids=PARAMETERS)
def test_a_request_is_decoded_as_an_engine_decodes_it_the_first_and_the_second_time(params: Any) -> None:
    codec = FrontEndCodec()
    for request_id in ("first", "second"):
        message = frames(request_id, params)
        alone = MsgpackDecoder(EngineCoreRequest).decode(message[1:])
        request = decoded(codec, message)
        assert fields(request) == fields(alone)
        assert MsgpackEncoder().encode(request) == MsgpackEncoder().encode(alone)


@pytest.mark.parametrize("params", [each for each in PARAMETERS.values() if each])
def test_parameters_that_requests_share_are_changed_for_none_of_them(params: Any) -> None:
    codec, api = FrontEndCodec(), EngineApi(custom_processors=True)
    first, second = (decoded(codec, frames(request_id, params)) for request_id in ("first", "second"))
    before = MsgpackEncoder().encode(second)
    movable = api.make_movable(first)
    for move in (Move.REPLAY, Move.RESUME):
        api.continuation(movable, move, [1, 2])
    take_extra_args(first, {"tenant"})
    assert second.sampling_params is decoded(codec, frames("third", params)).sampling_params
    assert MsgpackEncoder().encode(second) == before


def test_parameters_that_an_engine_refuses_are_refused_each_time() -> None:
    codec, wrong = FrontEndCodec(), SamplingParams()
    wrong.top_p = 3.0
    for request_id in ("first", "second"):
        with pytest.raises(StageInputError, match="top_p"):
            decoded(codec, frames(request_id, wrong))
    assert decoded(codec, frames("third", SamplingParams())).request_id == "third"


def test_only_a_bounded_number_of_short_parameters_is_kept() -> None:
    def decode(params: SamplingParams) -> Any:
        return decoded(codec, frames("request", params)).sampling_params

    codec = FrontEndCodec()
    first, long = SamplingParams(seed=0), SamplingParams(stop=["x" * 2000])
    kept = decode(first)
    assert decode(first) is kept
    assert decode(long) is not decode(long)
    for seed in range(1, 1100):
        decode(SamplingParams(seed=seed))
    assert decode(first) is not kept
    assert msgspec.structs.asdict(decode(first)) == msgspec.structs.asdict(kept)
