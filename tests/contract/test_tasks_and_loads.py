"""The tasks and loads that policies get, read from vLLM's own structs."""

import math
from typing import Any

import msgspec
import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.metrics.stats import KVCacheEvictionEvent, PrefillStats, SchedulerStats
from vllm.v1.pool.late_interaction import build_late_interaction_doc_params, build_late_interaction_query_params
from vllm.v1.serial_utils import MsgpackEncoder

from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import ready_response
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize, LoadReport
from vllm_omni_plugin.vllm_api.engine_messages.request_building import build_engine_core_request_from_tokens
from vllm_omni_plugin.vllm_api.engine_messages.scheduler_reports import fleet_levels

PROMPT = [5, 6, 7]


def request(params: Any = None, **fields: Any) -> EngineCoreRequest:
    made = build_engine_core_request_from_tokens(
        "r", {"prompt_token_ids": list(PROMPT)}, params or SamplingParams(max_tokens=9)
    )
    return msgspec.structs.replace(made, **fields)


def ready(**fields: Any) -> bytes:
    return ready_response(0, **{"num_gpu_blocks": 500, "block_size": 16, **fields})


def test_a_plain_request() -> None:
    made = request()
    task, _ = EngineApi().describe(made)
    prompt = task.pop("prompt")  # type: ignore[misc]
    assert (prompt.token_ids, prompt.lora_name, prompt.cache_salt, prompt.media) == (PROMPT, "", "", ())
    assert prompt.cacheable
    assert task == {
        "request_id": "r",
        "engine_inputs": made,
        "sampling_params": made.sampling_params,
        "session": None,
        "max_tokens": 9,
    }


def test_the_prompt_of_a_task_has_what_cached_blocks_depend_on() -> None:
    features = [
        MultiModalFeatureSpec(None, "image", f"hash {offset}", PlaceholderRange(offset=offset, length=1))
        for offset in (0, 2)
    ]
    task, _ = EngineApi().describe(
        request(lora_request=LoRARequest("adapter", 3, "path"), cache_salt="salt", session_id="s", mm_features=features)
    )
    prompt = task["prompt"]
    assert (prompt.lora_name, prompt.cache_salt, task["session"]) == ("adapter", "salt", "s")
    assert prompt.media == (("hash 0", 0, 1), ("hash 2", 2, 1))


@pytest.mark.parametrize(
    ("made", "cacheable"),
    [
        pytest.param(request(SamplingParams(max_tokens=9, prompt_logprobs=1)), False, id="prompt log-probabilities"),
        pytest.param(request(PoolingParams(task="embed")), True, id="pooling"),
        pytest.param(request(PoolingParams(skip_reading_prefix_cache=True)), False, id="pooling without a cache"),
        pytest.param(request(prompt_embeds=torch.zeros(3, 2)), False, id="tokens and embeddings"),
    ],
)
def test_whether_a_prompt_can_be_cached(made: EngineCoreRequest, cacheable: bool) -> None:
    prompt = EngineApi().describe(made)[0]["prompt"]
    assert (prompt.token_ids, prompt.cacheable) == (PROMPT, cacheable)


async def test_late_interaction_scoring_binds_documents_to_the_replica_of_their_query() -> None:
    pool = FakeFleet(replicas=3).pool
    homes = set()
    for number in range(30):
        name = f"late-interaction-{number}"
        query = build_late_interaction_query_params(name, query_uses=4)
        params = [query, *(build_late_interaction_doc_params(name) for _ in range(4))]
        made = [request(PoolingParams(task="token_embed", late_interaction_params=each)) for each in params]
        [home] = {pool.decide(*EngineApi().describe(each))[0] for each in made}
        homes.add(home)
    assert homes == set(pool.members)
    assert EngineApi().describe(request(PoolingParams(task="token_embed")))[1] is None


def test_cached_tokens_are_those_of_all_caches() -> None:
    stats = PrefillStats()
    stats.set(10, 4, 3)
    assert EngineApi().cached_tokens(EngineCoreOutput("r", [1], prefill_stats=stats)) == 7
    assert EngineApi().cached_tokens(EngineCoreOutput("r", [1])) is None


def test_requests_that_cannot_be_scheduled_yet_wait_too() -> None:
    stats = SchedulerStats(num_running_reqs=4, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.5)
    assert EngineApi().load_report(EngineCoreOutputs(scheduler_stats=stats)) == LoadReport(3, 4, 0.5)
    assert EngineApi().load_report(EngineCoreOutputs()) is None


def test_a_message_whose_load_is_cleared_reports_an_idle_engine() -> None:
    stats = SchedulerStats(num_running_reqs=4, num_waiting_reqs=2, num_skipped_waiting_reqs=1, kv_cache_usage=0.5)
    outputs = EngineCoreOutputs(scheduler_stats=stats)
    assert EngineApi().load_report(outputs, clear=True) == LoadReport(3, 4, 0.5)
    assert EngineApi().load_report(outputs) == LoadReport(0, 0, 0.0)


@pytest.mark.parametrize("usage", [math.nan, math.inf, -math.inf, -0.5, 7.0])
def test_an_invalid_kv_usage_is_zero_for_policies_and_in_sums_over_replicas(usage: float) -> None:
    outputs = received(SchedulerStats(kv_cache_usage=usage))
    assert EngineApi().load_report(outputs) == LoadReport(0, 0, 0.0)
    assert fleet_levels([outputs.scheduler_stats, SchedulerStats(kv_cache_usage=0.5)])["kv_cache_usage"] == 0.25


@pytest.mark.parametrize(("time", "is_kept"), [(2.5, True), (math.nan, False), (math.inf, False), (-1.0, False)])
def test_statistics_after_which_a_histogram_would_be_nan_or_fall_are_dropped(time: float, is_kept: bool) -> None:
    transfers = {"NixlConnector": {"transfer_duration": [1.0, time], "num_failed_transfers": 0, "name": "a"}}
    events = [KVCacheEvictionEvent(1.0, 2.0, (0.5,)), KVCacheEvictionEvent(1.0, 2.0, (0.5, time))]
    sent = SchedulerStats(
        num_running_reqs=3, kv_connector_stats=transfers, ec_connector_stats=transfers, kv_cache_eviction_events=events
    )
    stats = received(sent).scheduler_stats
    assert stats.num_running_reqs == 3
    assert [stats.kv_connector_stats, stats.ec_connector_stats] == [transfers if is_kept else None] * 2
    assert stats.kv_cache_eviction_events == (events if is_kept else events[:1])


def received(stats: SchedulerStats) -> Any:
    """A message with these statistics, as a head decodes it."""
    return EngineApi().decode_outputs(MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats)))


def test_the_size_of_an_engine_is_read_from_the_ready_response() -> None:
    sizes = {"max_num_batched_tokens": 2048, "max_num_seqs": 8, "max_model_len": 896, "max_loras": 4}
    assert EngineApi().engine_size(ready(**sizes)) == EngineSize(
        500, 16, 2048, sequences=8, max_model_len=896, adapters=4
    )
    assert EngineApi().engine_size(ready(effective_attention_block_size=64, **sizes)).block_size == 64


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (b"", "truncated"),
        (b"\xc1", "malformed"),
        (msgspec.msgpack.encode({"block_size": "x"}), "block_size"),
        (ready(dtype=b"\xff"), "dtype"),
        (ready(max_model_len=-1), "max_model_len is -1"),
        (ready(max_num_seqs=-1), "max_num_seqs is -1"),
        (ready(max_num_batched_tokens=-1), "max_num_batched_tokens is -1"),
        (ready(num_gpu_blocks=-1), "num_gpu_blocks is -1"),
        (ready(max_loras=-1), "max_loras is -1"),
    ],
)
def test_a_ready_response_that_cannot_be_used_is_refused(payload: bytes, complaint: str) -> None:
    with pytest.raises(WireError, match=f"not a valid EngineCoreReadyResponse: .*{complaint}"):
        EngineApi().engine_size(payload)
