"""vLLM's OutputProcessor behind our guard: what it cannot process fails one request, and AsyncLLM's loop goes on."""

from collections.abc import Sequence
from math import inf, nan
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.exceptions import GracefulHTTPError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType, EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.stats import IterationStats, PrefillStats, RequestSpecDecodeMetrics, SchedulerStats
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.core_client.output_guard import guard_outputs, guard_statistics
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    AbortRequests,
    OutputUnusable,
    ReplicaJoined,
    RequestMessage,
)
from vllm_omni_plugin.vllm_api.codecs.front_end_arrays import find_unreadable
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi

from .stage_models import source


def logprobs(*shape: int) -> LogprobsLists:
    return LogprobsLists(np.ones(shape, np.int64), np.zeros(shape, np.float32), np.ones(shape[:1], np.int64))


class Front:
    """AsyncLLM's side of a fleet that runs nothing."""

    def __init__(self, client: FleetClient) -> None:
        self.client = client
        self.orchestrator = client.orchestrator
        self.processor = OutputProcessor(None, log_stats=True)
        self.loggers = SimpleNamespace(record=self.record)
        self.recorded: list[int] = []
        self.client.bind(self.processor, None)

    def record(self, **stats: Any) -> None:
        if stats["scheduler_stats"] == "bad":
            raise ValueError("Counters can only be incremented by non-negative amounts.")
        self.recorded.append(stats["engine_idx"])

    def add(self, request_id: str, **sampling: Any) -> RequestOutputCollector:
        params = SamplingParams(output_kind=RequestOutputKind.DELTA, **sampling)
        request = source([1], params, request_id=request_id)
        queue = RequestOutputCollector(params.output_kind, request_id)
        if params.n == 1:
            self.processor.add_request(request, None, queue=queue)
            return queue
        parent = ParentRequest(request)
        for index in range(params.n):
            child_id, child_params = parent.get_child_info(index)
            child = source([1], child_params, request_id=child_id)
            self.processor.add_request(child, None, parent, index, queue)
        return queue

    async def receive(self, sender: int, *outputs: EngineCoreOutput) -> None:
        """As AsyncLLM's loop does with a message of this engine."""
        message = EngineCoreOutputs(engine_index=sender, outputs=list(outputs))
        self.orchestrator.front_end.output_async_queue.put(message)
        assert await self.client.get_output_async() is message
        self.process(*message.outputs)

    def process(self, *outputs: EngineCoreOutput) -> list[str]:
        """As AsyncLLM's loop does; returns what it is to abort."""
        return list(self.processor.process_outputs(list(outputs), 1.0, IterationStats()).reqs_to_abort)

    async def told(self) -> list[RequestMessage]:
        queue = self.orchestrator.front_end.request_async_queue
        return list(await queue.get_batch()) if len(queue) else []

    async def aborted(self) -> list[str]:
        """What engines are told to abort beside that."""
        messages = await self.told()
        return [name for message in messages if isinstance(message, AbortRequests) for name in message.request_ids]


@pytest.fixture
def front(client: FleetClient) -> Front:
    return Front(client)


def bad(request_id: str) -> EngineCoreOutput:
    """vLLM's OutputProcessor raises over it, and no shape of it is wrong."""
    return EngineCoreOutput(request_id, [5], new_logprobs=logprobs(1, 1))


async def test_an_output_that_cannot_be_processed_fails_its_request_alone(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    queues = [front.add(name) for name in "abcd"]
    assert front.process(EngineCoreOutput("a", [1]), bad("b"), EngineCoreOutput("c", [3]), bad("d")) == []
    assert queues[0].get_nowait().outputs[0].token_ids == [1]
    assert queues[2].get_nowait().outputs[0].token_ids == [3]
    for queue in (queues[1], queues[3]):
        with pytest.raises(GracefulHTTPError, match="The model's output could not be processed: AssertionError"):
            queue.get_nowait()
    assert sorted(front.processor.request_states) == ["a", "c"]
    assert await front.aborted() == ["b", "d"]
    assert "Request b fails, because vLLM cannot process its output." in caplog.text
    # Late outputs, before the engine has heard of the abort.
    assert front.process(bad("b"), EngineCoreOutput("a", [2], finish_reason=FinishReason.STOP)) == []
    assert queues[0].get_nowait().finished


@pytest.mark.parametrize(
    ("sampling", "fields"),
    [
        pytest.param({}, {"new_logprobs": logprobs(1, 3)}, id="not asked for"),
        pytest.param({"logprobs": 1}, {"new_logprobs": logprobs(3)}, id="one dimension"),
        pytest.param({}, {"routed_experts": np.array(1), "finish_reason": FinishReason.STOP}, id="no experts"),
    ],
)
async def test_the_sender_of_an_output_that_cannot_be_processed_is_reported_after_the_abort(
    front: Front, sampling: dict[str, Any], fields: dict[str, Any]
) -> None:
    queue, other = front.add("bad", **sampling), front.add("good")
    await front.receive(0, EngineCoreOutput("bad", [4]) if not sampling else EngineCoreOutput("good", [1]))
    await front.receive(3, EngineCoreOutput("bad", [5], **fields), EngineCoreOutput("good", [2]))
    with pytest.raises(GracefulHTTPError, match="The model's output could not be processed: "):
        queue.get_nowait()
    assert other.get_nowait().outputs[0].token_ids[-1] == 2
    abort, complaint = await front.told()
    assert isinstance(abort, AbortRequests)
    assert isinstance(complaint, OutputUnusable)
    assert (abort.request_ids, complaint.request_id, complaint.engine_index) == (("bad",), "bad", 3)


async def test_a_sample_that_cannot_be_processed_ends_its_request_with_one_error(front: Front) -> None:
    queue = front.add("r", n=3)
    children = list(front.processor.request_states)
    front.process(EngineCoreOutput(children[0], [1]), bad(children[1]), EngineCoreOutput(children[2], [3]))
    with pytest.raises(GracefulHTTPError):
        queue.get_nowait()
    assert front.processor.request_states == {}
    assert front.processor.parent_requests == {}
    assert sorted(await front.aborted()) == sorted(children)


async def test_a_request_that_cannot_even_be_ended_as_vllm_does_is_ended(front: Front) -> None:
    queue, other = front.add("r"), front.add("other")
    front.process(EngineCoreOutput("r", [1], routed_experts=np.ones((1, 2, 3))))
    queue.get_nowait()
    last = EngineCoreOutput("r", [2], finish_reason=FinishReason.LENGTH, routed_experts=np.ones((1, 5)))
    front.process(last, EngineCoreOutput("other", [7]))
    with pytest.raises(GracefulHTTPError):
        queue.get_nowait()
    assert other.get_nowait().outputs[0].token_ids == [7]
    assert list(front.processor.request_states) == ["other"]


class Panic(BaseException):
    """What Rust code raises when it panics, such as that of tokenizers."""


@pytest.mark.parametrize("error", [IndexError, Panic])
def test_requests_that_stopped_before_an_output_that_cannot_be_processed_are_aborted_too(
    error: type[BaseException],
) -> None:
    class Processor:
        """Stops request "a" at a stop string, and cannot process "b"."""

        def __init__(self) -> None:
            self.request_states = {"a": 1, "b": 2, "c": 3}

        def process_outputs(self, outputs: Any) -> Any:
            to_abort = []
            for output in outputs:
                if output.request_id == "b":
                    raise error
                to_abort.append(output.request_id)
                del self.request_states[output.request_id]
            return SimpleNamespace(reqs_to_abort=to_abort)

    processor, failed = Processor(), []
    guard_outputs(processor, lambda request_id, error: failed.append(request_id))
    outputs = [EngineCoreOutput(name, [1]) for name in "abc"]
    assert processor.process_outputs(outputs).reqs_to_abort == ["a", "c"]
    assert failed == ["b"]


async def test_an_event_that_cannot_be_handled_delays_no_output(front: Front, caplog: pytest.LogCaptureFixture) -> None:
    report = EngineApi().idle_report(3)
    front.orchestrator.front_end.output_async_queue.put(ReplicaJoined(9, 0, b"a stage that there is not"))
    front.orchestrator.front_end.output_async_queue.put(report)
    assert await front.client.get_output_async() is report
    assert "ReplicaJoined could not be handled." in caplog.text


def test_statistics_that_cannot_be_recorded_are_left_out_and_logged_once(
    front: Front, caplog: pytest.LogCaptureFixture
) -> None:
    guard_statistics(front.loggers)
    for stats in ("bad", "good", "bad"):
        front.loggers.record(engine_idx=4, scheduler_stats=stats, iteration_stats=None)
    assert front.recorded == [4]
    assert [record.getMessage() for record in caplog.records if record.levelname == "ERROR"] == [
        "Statistics of engine 4 cannot be processed and are dropped."
    ]


HIGHEST = 2**31 - 1
PROMPT_LOGPROBS = LogprobsTensors(*map(torch.from_numpy, logprobs(4, 2)[:3]))


def sent(output: Any, timestamp: float = 1.5) -> Sequence[Any]:
    outputs = [EngineCoreOutput("first", [1]), output, EngineCoreOutput("last", [2])]
    stats = SchedulerStats(num_running_reqs=3)
    message = EngineCoreOutputs(outputs=outputs, scheduler_stats=stats, timestamp=timestamp)
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
    assert (vars(decoded.scheduler_stats), decoded.timestamp) == (vars(vllms.scheduler_stats), 1.5)


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


@pytest.mark.parametrize("time", [nan, inf, -1.0, 1e300])
def test_a_time_after_which_sums_of_times_would_be_nan_for_ever_is_refused(time: float) -> None:
    event = EngineCoreEvent(EngineCoreEventType.QUEUED, time)
    for frames in (sent(EngineCoreOutput("r", [1]), time), sent(EngineCoreOutput("r", [1], events=[event]))):
        with pytest.raises(WireError):
            EngineApi().decode_outputs(frames)


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
