"""vLLM's Rust front end reads what the fleet sends to it, and sends what the fleet reads. With the real program."""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreEvent,
    EngineCoreEventType,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.metrics.perf import PerfStats
from vllm.v1.metrics.stats import (
    KVCacheEvictionEvent,
    PrefillStats,
    PrefixCacheStats,
    RequestSpecDecodeMetrics,
    SchedulerStats,
)
from vllm.v1.outputs import LogprobsLists
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from tests.fakes.conditions import eventually
from tests.fakes.links import refuse_calls
from vllm_omni_plugin.errors import NoReplicaError, OmniError, StageInputError
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import RequestFailed
from vllm_omni_plugin.vllm_api.codecs.front_end_codec import as_only_engine
from vllm_omni_plugin.vllm_api.engine_messages.scheduler_reports import fleet_levels, fleet_report

from .head import Head, answers_itself, started_head
from .played import READY


@pytest.fixture
async def head(tiny_model: Path, sockets: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Head]:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    async with started_head(tiny_model) as head:
        yield head
        # One message that it does not expect makes it fail all requests for ever.
        answers_itself(head.fleet)
        assert (await head.ask(max_tokens=3)).status_code == 200
        assert await head.is_healthy()
        assert len(head.processes) == 2


def test_it_reads_these_structs_by_position() -> None:
    """As vllm-rs 0.33 does: a struct that has changed must be compared with the sources of that version's `vllm-rs`."""
    assert EngineCoreOutputs.__struct_fields__ == (
        *("engine_index", "outputs", "scheduler_stats", "timestamp", "utility_output"),
        *("finished_requests", "wave_complete", "start_wave", "weight_version"),
    )
    assert EngineCoreOutput.__struct_fields__ == (
        *("request_id", "new_token_ids", "new_logprobs", "new_prompt_logprobs_tensors", "pooling_output"),
        *("finish_reason", "stop_reason", "events", "kv_transfer_params", "ec_transfer_params", "trace_headers"),
        *("prefill_stats", "routed_experts", "num_nans_in_logits", "mm_cache_miss_hashes", "new_sampling_mask"),
        *("spec_decode_metrics", "prompt_token_id_logprobs", "error"),
    )
    assert UtilityOutput.__struct_fields__ == ("call_id", "failure_message", "result")
    assert {reason.name: reason.value for reason in FinishReason} == {
        "STOP": 0,
        "LENGTH": 1,
        "ABORT": 2,
        "ERROR": 3,
        "REPETITION": 4,
    }


def test_it_writes_this_struct_by_position() -> None:
    assert EngineCoreRequest.__struct_fields__ == (
        *("request_id", "prompt_token_ids", "mm_features", "sampling_params", "pooling_params", "arrival_time"),
        *("lora_request", "cache_salt", "data_parallel_rank", "prompt_embeds", "prompt_is_token_ids", "client_index"),
        *("current_wave", "priority", "trace_headers", "resumable", "external_req_id", "reasoning_ended"),
        *("reasoning_parser_kwargs", "abort_immediately", "session_id", "kv_hints"),
    )


async def test_the_ready_response_of_a_fleet_is_that_of_one_engine(tiny_model: Path, sockets: Path) -> None:
    engine = msgspec.msgpack.decode(READY, type=EngineCoreReadyResponse)
    engine.data_parallel_size, engine.data_parallel_rank, engine.max_model_len = 4, 3, 256
    engine.dp_stats_address = engine.coordinator_input_address = "tcp://127.0.0.1:9"
    only = as_only_engine([READY, msgspec.msgpack.encode(engine)])
    async with started_head(tiny_model, ready_response=only) as head:
        assert (await head.client.get("/v1/models")).json()["data"][0]["max_model_len"] == 256


async def test_a_request_arrives_with_all_its_fields(head: Head) -> None:
    body = {"max_tokens": 7, "priority": 5, "cache_salt": "salt", "vllm_xargs": {"tenant": "a"}, "stop_token_ids": [4]}
    headers = {"X-Request-Id": "mine", "X-Session-ID": "session"}
    asking = asyncio.create_task(
        head.client.post("/v1/completions", json={"model": "tiny", "prompt": "red", **body}, headers=headers)
    )
    [request_id] = await head.requested()
    request = head.fleet.orchestrator.request_states[request_id].request
    assert request.prompt_token_ids == [1, 3]
    assert (request.external_req_id, request.session_id, request.cache_salt) == ("cmpl-mine", "session", "salt")
    assert request_id.startswith("cmpl-mine-")
    assert (request.priority, request.data_parallel_rank, request.lora_request) == (5, None, None)
    params = request.sampling_params
    assert isinstance(params, SamplingParams)
    assert (params.max_tokens, params.extra_args, params.stop_token_ids) == (7, {"tenant": "a"}, [4])
    head.fleet.say(request_id, finish=FinishReason.ABORT)
    assert (await asking).json()["choices"][0]["finish_reason"] == "abort"


async def test_a_client_that_hangs_up_ends_the_work(head: Head) -> None:
    asking = head.ask_later()
    [request_id] = await head.requested()
    link, engine_id = head.fleet.run_of(request_id)
    asking.cancel()
    await head.fleet.has()
    assert link.aborted == [engine_id]


async def test_outputs_become_an_answer(head: Head) -> None:
    asking = head.ask_later(logprobs=2)
    [request_id] = await head.requested()
    prefilled = PrefillStats()
    prefilled.set(2, num_local_cached_tokens=1, num_external_cached_tokens=0)
    events = [EngineCoreEvent(kind, 1.0) for kind in (EngineCoreEventType.QUEUED, EngineCoreEventType.SCHEDULED)]
    head.fleet.say(request_id, 3, new_logprobs=logprobs(1), prefill_stats=prefilled, events=events)
    # Arrays of this size are frames of their own.
    head.fleet.say(request_id, *[4] * 40, new_logprobs=logprobs(40), stop_reason=4, finish=FinishReason.STOP)
    answer = (await asking).json()
    choice = answer["choices"][0]
    # Without the stop token.
    assert choice["text"].split() == ["red", *["green"] * 39]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", 4)
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 41
    assert answer["usage"]["completion_tokens"] == 41


def logprobs(tokens: int) -> LogprobsLists:
    rows = np.array([[3, 4]] * tokens), np.array([[-0.5, -1.5]] * tokens, np.float32), np.ones(tokens, np.int64)
    return LogprobsLists(*rows)


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (NoReplicaError("No replica."), 503, "No replica."),
        (StageInputError("Too long."), 400, "Too long."),
        (OmniError("A secret."), 500, "Internal server error"),
    ],
)
async def test_a_failure_becomes_its_status(head: Head, error: Exception, status: int, message: str) -> None:
    asking = head.ask_later()
    [request_id] = await head.requested()
    head.fleet.link.give(RequestFailed(request_id, error))
    answer = await asking
    said = answer.json()["error"]
    assert (answer.status_code, said["code"], said["message"]) == (status, status, message)


FULL = SchedulerStats(
    num_running_reqs=1,
    num_waiting_reqs=2,
    num_skipped_waiting_reqs=3,
    num_kv_fetch_reqs_by_stage={"in_progress": 1},
    step_counter=4,
    current_wave=5,
    kv_cache_usage=0.5,
    prefix_cache_stats=PrefixCacheStats(False, 1, 10, 5),
    connector_prefix_cache_stats=PrefixCacheStats(True, 1, 10, 5),
    kv_cache_eviction_events=[KVCacheEvictionEvent(1.0, 2.0, (3.0,))],
    spec_decoding_stats=SpecDecodingStats(2, 1, 2, 1, [1, 0], [1, 1]),
    kv_connector_stats={"transfers": [1, 2]},
    ec_connector_stats={"transfers": 1},
    waiting_lora_adapters={"a": 1},
    running_lora_adapters={"b": 1},
    cudagraph_stats=CUDAGraphStat(1, 2, 1, "FULL"),
    perf_stats=PerfStats(1, 2, 3),
)
SHORT = msgspec.convert({"num_running_reqs": 1, "num_waiting_reqs": 2}, SchedulerStats)


@pytest.mark.parametrize(
    "report",
    [
        pytest.param(SchedulerStats(), id="empty"),
        pytest.param(FULL, id="full"),
        pytest.param(fleet_report(FULL, fleet_levels([FULL, SchedulerStats(num_running_reqs=3)])), id="of a fleet"),
        pytest.param(fleet_report(SHORT, fleet_levels([SHORT])), id="of a Python stage"),
        pytest.param(SchedulerStats(kv_connector_stats={"NixlConnector": {"other": 1}}), id="of a connector"),
        pytest.param(SchedulerStats(num_running_reqs=1, num_waiting_reqs=-1), id="below 0"),
        pytest.param(SchedulerStats(prefix_cache_stats=PrefixCacheStats(False, 1, 10, -5)), id="hits below 0"),
        pytest.param(SchedulerStats(perf_stats=PerfStats(-1, 2, 3)), id="operations below 0"),
        pytest.param(
            SchedulerStats(spec_decoding_stats=SpecDecodingStats(1, 1, 1, 1, [-1], [1])), id="accepted below 0"
        ),
    ],
)
async def test_statistics_are_its_metrics(head: Head, report: SchedulerStats) -> None:
    # Of a replica where this head has no request, the gauges would be 0.
    running = head.ask_later(max_tokens=1)
    [request_id] = await head.requested()
    link, _ = head.fleet.run_of(request_id)
    head.fleet.reports.clear()
    link.say_outputs(scheduler_stats=report, finished_requests={"a"}, wave_complete=1)
    await eventually(lambda: head.fleet.reports, "the handling of the report")
    head.fleet.say(request_id, 3, finish=FinishReason.LENGTH)
    assert (await running).status_code == 200
    samples = dict(line.rsplit(" ", 1) for line in (await head.client.get("/metrics")).text.splitlines())
    assert float(samples['vllm:num_requests_running{model_name="tiny",engine="0"}']) == report.num_running_reqs


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"prefill_stats": PrefillStats(num_prompt_tokens=2, num_cached_tokens=-1)}, 200),
        ({"kv_transfer_params": {"a": b"bytes"}}, 500),
        ({"ec_transfer_params": {"a": {1: 2}}}, 500),
        # Their replica is lost, and another one answers.
        ({"num_nans_in_logits": -1}, 200),
        ({"routed_experts": np.array(["text"])}, 200),
        ({"spec_decode_metrics": RequestSpecDecodeMetrics(-1)}, 200),
    ],
    ids=str,
)
async def test_an_output_that_it_cannot_read_does_no_harm_to_others(
    head: Head, fields: dict[str, Any], status: int
) -> None:
    asking = head.ask_later()
    [request_id] = await head.requested()
    answers_itself(head.fleet)
    head.fleet.say(request_id, 3, finish=FinishReason.LENGTH, **fields)
    assert (await asking).status_code == status


@pytest.mark.parametrize(
    "say",
    [
        pytest.param(lambda link: link.say_outputs(), id="nothing"),
        pytest.param(lambda link: link.say_outputs(wave_complete=3), id="the end of a wave"),
        pytest.param(lambda link: link.say_outputs(start_wave=3), id="the start of a wave"),
        pytest.param(lambda link: link.say_outputs(finished_requests={"a"}), id="the end of requests"),
        pytest.param(lambda link: link.say_outputs(outputs=[EngineCoreOutput("unknown", [3])]), id="unknown"),
        pytest.param(lambda link: link.say_dead(), id="death"),
    ],
)
async def test_what_an_engine_says_beside_outputs_does_it_no_harm(head: Head, say: Callable[[Any], None]) -> None:
    say(head.fleet.links[1])


async def test_calls_are_answered(head: Head) -> None:
    head.fleet.answer_with(lambda link, call_id, method, args: link.answer(call_id, True))
    assert (await head.client.get("/is_sleeping")).json() == {"is_sleeping": True}
    head.fleet.answer_with(refuse_calls)
    failed = await head.client.post("/reset_prefix_cache")
    assert failed.status_code == 500
    assert "refuses reset_prefix_cache" in failed.json()["error"]["message"]
