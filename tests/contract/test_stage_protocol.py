"""vLLM reads the messages of Python stages, which do not import it, and they read those of vLLM."""

from typing import Any

import msgspec
import pytest
import torch
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.engine import UtilityOutput as EngineUtilityOutput
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.metrics.stats import SchedulerStats as EngineSchedulerStats
from vllm.v1.serial_utils import CUSTOM_TYPE_RAW_VIEW, MsgpackDecoder

from vllm_omni_plugin.vllm_api.codecs import stage_protocol
from vllm_omni_plugin.vllm_api.codecs.stage_codec import StageCodec
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import (
    OutputContent,
    SchedulerStats,
    WireOutput,
    WireOutputs,
)


def decoded(frames: Any) -> EngineCoreOutputs:
    # Frames that are received can be written to, and torch warns of those that cannot.
    return MsgpackDecoder(EngineCoreOutputs).decode([bytearray(frame) for frame in frames])


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (WireOutput, EngineCoreOutput),
        (WireOutputs, EngineCoreOutputs),
        (stage_protocol.UtilityOutput, EngineUtilityOutput),
    ],
)
def test_our_fields_are_the_first_of_vllms(ours: type[msgspec.Struct], theirs: type[msgspec.Struct]) -> None:
    assert theirs.__struct_fields__[: len(ours.__struct_fields__)] == ours.__struct_fields__


def test_type_bytes_reasons_and_extensions_are_vllms() -> None:
    for kind in ("ADD", "ABORT", "UTILITY"):
        assert EngineCoreRequestType[kind].value == getattr(stage_protocol, kind)
    for reason, ours in (("STOP", "STOP"), ("ABORT", "ABORTED"), ("ERROR", "ERROR")):
        assert FinishReason[reason] == getattr(stage_protocol, ours)
    assert stage_protocol.RAW_VIEW == CUSTOM_TYPE_RAW_VIEW
    assert stage_protocol.ENGINE_DEAD == EngineCoreProc.ENGINE_CORE_DEAD


@pytest.mark.parametrize("size", [2, 2000])
def test_vllm_reads_outputs_with_tensors_and_statistics(size: int) -> None:
    tensor = torch.arange(float(size))
    content = {stage_protocol.CONTENT_KEY: OutputContent("text", [7], {"rate": 24000})}
    said = WireOutput("a", [0], pooling_output=tensor, finish_reason=stage_protocol.STOP, kv_transfer_params=content)
    read = decoded(StageCodec().encode_outputs([said], SchedulerStats(2, 3), 1.5))
    assert read.timestamp == 1.5
    assert read.scheduler_stats == EngineSchedulerStats(num_running_reqs=2, num_waiting_reqs=3)
    (output,) = read.outputs
    assert torch.equal(output.pooling_output, tensor)
    assert (output.request_id, output.new_token_ids, output.finish_reason) == ("a", [0], FinishReason.STOP)
    assert output.kv_transfer_params == {"omni": {"text": "text", "token_ids": [7], "metadata": {"rate": 24000}}}


def test_vllm_reads_the_ready_response() -> None:
    response = msgspec.msgpack.decode(stage_protocol.ready_response(3), type=EngineCoreReadyResponse)
    assert (response.data_parallel_rank, response.num_gpu_blocks, response.kv_events_config) == (3, 0, None)
