"""Where stages fetch caches from is said by their pipeline, never by a client, wherever it can say it to vLLM."""

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.request import Request

with warnings.catch_warnings():
    # Importing vLLM's server warns, and warnings are errors here.
    warnings.simplefilter("ignore")
    from starlette.datastructures import UploadFile
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest
    from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
    from vllm.entrypoints.speech_to_text.translation.protocol import TranslationRequest

from tests.fakes.idle_fleet import IdleFleet
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages
from vllm_omni_plugin.pipeline import VLLM_ENGINE, Modality, Pipeline, Stage
from vllm_omni_plugin.vllm_api.engine_messages.request_building import (
    build_engine_core_request_from_tokens,
    drop_transfers,
)

PREFILL = Stage(0, "prefill", VLLM_ENGINE, Modality.KV_CACHE, "m")
DECODE = Stage(1, "decode", VLLM_ENGINE, Modality.TEXT, "m", inputs=("prefill",), final=True)
BEHIND_A_PIPELINE = FleetStages(Pipeline((PREFILL, DECODE)), [None, None])
OF_ONE_MODEL = FleetStages(None, [None])
ADDRESS = {"do_remote_prefill": True, "remote_host": "10.0.0.9", "remote_port": 7}
FIELDS = {"kv_transfer_params": ADDRESS, "ec_transfer_params": {"hash": {"peer_host": "10.0.0.9"}}}
# Which takes no objects; connectors would choke on it.
ARGUMENTS = {"vllm_xargs": {"kv_transfer_params": ["10.0.0.9", 7], "ec_transfer_params": "10.0.0.9", "mine": 1}}
MESSAGES: Any = [{"role": "user", "content": "Hello"}]


def chat(**body: Any) -> SamplingParams:
    return ChatCompletionRequest(messages=MESSAGES, **body).to_sampling_params(16, {})


def batch(**body: Any) -> SamplingParams:
    asked = BatchChatCompletionRequest(messages=[MESSAGES], **body).to_chat_completion_request(MESSAGES)
    return asked.to_sampling_params(16, {})


def completion(**body: Any) -> SamplingParams:
    return CompletionRequest(prompt="Hello", **body).to_sampling_params(16)


def responses(**body: Any) -> SamplingParams:
    return ResponsesRequest(input="Hello", **body).to_sampling_params(16)


def messages(**body: Any) -> SamplingParams:
    asked = AnthropicMessagesRequest(model="m", max_tokens=16, messages=MESSAGES, **body)
    return AnthropicServingMessages._build_base_request(asked, MESSAGES).to_sampling_params(16, {})


def transcription(**body: Any) -> SamplingParams:
    return TranscriptionRequest(file=UploadFile(io.BytesIO(b"")), **body).to_sampling_params(16)


def translation(**body: Any) -> SamplingParams:
    return TranslationRequest(file=UploadFile(io.BytesIO(b"")), **body).to_sampling_params(16)


def generate(**extra: Any) -> SamplingParams:
    return GenerateRequest.model_validate({"token_ids": [1], "sampling_params": {"extra_args": extra}}).sampling_params


PLACES = [
    *((api, FIELDS) for api in (chat, batch, completion, responses, messages, generate)),
    *((api, ARGUMENTS) for api in (chat, batch, completion, responses, messages, transcription, translation)),
]


def request(params: SamplingParams) -> EngineCoreRequest:
    made: EngineCoreRequest = build_engine_core_request_from_tokens("r", {"prompt_token_ids": [1, 2, 3]}, params)
    return made


def at_the_engine(made: EngineCoreRequest) -> tuple[Any, Any]:
    """What an engine's connectors read of the request."""
    told = Request.from_engine_core_request(made, None)
    return told.kv_transfer_params, told.ec_transfer_params


@pytest.mark.parametrize(("api", "body"), PLACES)
def test_cache_parameters_of_a_client_reach_no_stage_of_a_pipeline(
    api: Callable[..., SamplingParams], body: dict[str, Any]
) -> None:
    made = request(api(**copy.deepcopy(body)))
    assert None not in at_the_engine(made)
    drop_transfers(made)
    assert at_the_engine(made) == (None, None)
    mine = body.get("vllm_xargs", {}).get("mine")
    assert made.sampling_params.extra_args == (None if mine is None else {"mine": mine})


@pytest.mark.parametrize("fields", [{}, {"extra_args": {"mine": 1}}])
def test_nothing_else_of_a_request_is_touched(fields: dict[str, Any]) -> None:
    made = request(SamplingParams(**fields))
    before = made.sampling_params
    drop_transfers(made)
    assert made.sampling_params is before


@pytest.mark.parametrize("stages", [OF_ONE_MODEL, BEHIND_A_PIPELINE])
async def test_one_model_without_a_pipeline_gets_what_vllm_would(fleet: IdleFleet, stages: FleetStages) -> None:
    fleet.stages = stages
    client = FleetClient(fleet, None, [])
    made = request(completion(**copy.deepcopy(FIELDS)))
    await client.add_request_async(made)
    client.shutdown()
    assert at_the_engine(made) == (tuple(FIELDS.values()) if stages is OF_ONE_MODEL else (None, None))
