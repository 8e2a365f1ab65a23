"""Outputs with invalid token ids are refused; all others are decoded as vLLM decodes them."""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.metrics.stats import PrefillStats, RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.vllm_api.codecs.front_end_arrays import find_unreadable
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi

from .test_output_guard import logprobs

HIGHEST = 2**31 - 1
PROMPT_LOGPROBS = LogprobsTensors(*map(torch.from_numpy, logprobs(4, 2)[:3]))


def sent(output: Any) -> Sequence[Any]:
    outputs = [EngineCoreOutput("first", [1]), output, EngineCoreOutput("last", [2])]
    message = EngineCoreOutputs(outputs=outputs, scheduler_stats=SchedulerStats(num_running_reqs=3), timestamp=1.5)
    return [bytearray(frame) for frame in MsgpackEncoder().encode(message)]


@pytest.mark.parametrize(
    "output",
    [
        pytest.param(EngineCoreOutput("r", [0, HIGHEST], finish_reason=FinishReason.STOP), id="tokens"),
        pytest.param(EngineCoreOutput("r", [], finish_reason=FinishReason.ABORT), id="no token"),
        pytest.param(EngineCoreOutput("r", [5], new_logprobs=logprobs(1, 3)), id="logprobs"),
        pytest.param(EngineCoreOutput("r", [5], new_prompt_logprobs_tensors=PROMPT_LOGPROBS), id="prompt logprobs"),
        pytest.param(
            EngineCoreOutput("r", [], pooling_output=torch.ones(8), finish_reason=FinishReason.STOP), id="pooling"
        ),
    ],
)
def test_a_message_is_decoded_as_vllm_does(output: Any) -> None:
    frames = sent(output)
    decoded = EngineApi().decode_outputs(frames)
    assert isinstance(decoded, EngineCoreOutputs)
    assert all(isinstance(each, EngineCoreOutput) for each in decoded.outputs)
    vllms = MsgpackDecoder(EngineCoreOutputs).decode(frames)
    assert repr(msgspec.structs.asdict(decoded.outputs[1])) == repr(msgspec.structs.asdict(vllms.outputs[1]))
    assert (decoded.scheduler_stats, decoded.timestamp) == (vllms.scheduler_stats, 1.5)


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [([HIGHEST + 1], "<= 2147483647"), ([3, -1], ">= 0"), ([2**63], "Integer|int"), (["a"], "int"), ([1.5], "int")],
)
def test_an_invalid_token_id_is_refused(tokens: list[Any], complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        EngineApi().decode_outputs(sent(EngineCoreOutput("r", tokens)))


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_reason": -1},
        {"num_nans_in_logits": -1},
        {"num_nans_in_logits": 2**32},
        {"spec_decode_metrics": RequestSpecDecodeMetrics(1, [2, -1])},
        {"routed_experts": np.array(["text"])},
        {"routed_experts": np.ones((1, 1), np.complex64)},
    ],
    ids=repr,
)
def test_numbers_that_a_front_end_cannot_read_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        EngineApi().decode_outputs(sent(EngineCoreOutput("r", [1], **fields)))


def test_a_tensor_that_only_python_stages_read_is_decoded_and_not_for_the_rust_front_end() -> None:
    for kind, unreadable in ((torch.float16, []), (torch.complex64, ["pooling_output"])):
        message = sent(EngineCoreOutput("r", [], pooling_output=torch.ones(1, dtype=kind)))
        outputs = EngineApi().decode_outputs(message).outputs
        assert outputs[1].pooling_output.dtype is kind
        assert [field for _, field in find_unreadable(outputs)] == unreadable


def test_prompt_tokens_below_0_are_none() -> None:
    stats = PrefillStats(num_prompt_tokens=7, num_computed_tokens=8, num_cached_tokens=-1)
    decoded = EngineApi().decode_outputs(sent(EngineCoreOutput("r", [1], prefill_stats=stats))).outputs[1]
    assert (decoded.prefill_stats.num_prompt_tokens, decoded.prefill_stats.num_cached_tokens) == (7, 0)
    assert EngineApi().cached_tokens(decoded) == 0
