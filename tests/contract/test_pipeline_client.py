"""The client of a fleet of several stages, as AsyncLLM uses it."""

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from vllm.lora.request import LoRARequest

from tests.fakes.engine_api import FakeEngineApi
from tests.fakes.idle_fleet import IdleFleet
from vllm_omni_plugin.balancing import RandomBalancer
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator.protocol.call_effects import FORGET_LORA, HEAD_CALLS, encode, leaves_state
from vllm_omni_plugin.errors import MessageTooLargeError, NoReplicaError, ReplicaError, StageError, StageInputError
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.core_client.request_failures import to_http
from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages
from vllm_omni_plugin.integration.http.app import FleetEndpoints
from vllm_omni_plugin.integration.options.additional_config import LOCAL_ADMIN_KEY, SHARED_DRAIN_FLAG, store_options
from vllm_omni_plugin.orchestrator import Orchestrator, StagePool
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadRules
from vllm_omni_plugin.orchestrator.multi_stage.input_builder import StageInputBuilder
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    AbortRequests,
    CallReplicas,
    ReplicaJoined,
)
from vllm_omni_plugin.pipeline import VLLM_ENGINE, Modality, Pipeline, Stage
from vllm_omni_plugin.vllm_api.codecs.message_filter import ALLOWED_CALLS
from vllm_omni_plugin.vllm_api.codecs.sim_protocol import ready_response
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.versions.differences import PAUSE_REFUSES

PIPELINE = Pipeline(
    (
        Stage(0, "reader", "package.module:Reader", Modality.LATENT),
        Stage(1, "thinker", VLLM_ENGINE, Modality.TEXT, model="m"),
        Stage(2, "joiner", VLLM_ENGINE, Modality.TEXT, "m", inputs=("reader", "thinker"), transform="operator:eq"),
        Stage(3, "refiner", VLLM_ENGINE, Modality.TEXT, model="n", inputs=("joiner",), final=True),
    )
)
"""The prompt is read by stage 1, whose model stage 2 runs, too."""
ALL = None


def config(max_model_len: int) -> Any:
    """What of a configuration ready responses are made of, and complete."""
    return SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=max_model_len, dtype="torch.float32"),
        cache_config=SimpleNamespace(num_gpu_blocks=None, block_size=0),
        parallel_config=SimpleNamespace(
            _coord_store_port=0,
            world_size=1,
            data_parallel_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=256),
        lora_config=None,
        instance_id="fleet",
    )


def ready(max_model_len: int, replica_id: int = 0) -> bytes:
    return ready_response(config(max_model_len), replica_id, kv_blocks=100, block_size=16)


class Head(IdleFleet):
    """A client in front of stages with a replica, which never serves, for each ready response.

    Its reader of prompts has a configuration of its own.

    Attributes:
        own: AsyncLLM's configuration.
        configs: those of the stages' engines.
    """

    def __init__(self, ready_responses: list[list[bytes]]) -> None:
        pools = [StagePool(stage.id, RandomBalancer()) for stage in PIPELINE.stages]
        for pool, responses in zip(pools, ready_responses, strict=True):
            for replica_id in range(len(responses)):
                pool.add(replica_id)
        apis: Any = [FakeEngineApi() for _ in PIPELINE.stages]
        builder = StageInputBuilder(PIPELINE, apis, str)
        super().__init__(Orchestrator(pools, apis, HeadRules(0), time.monotonic, input_builder=builder))
        self.own = config(1000)
        self.configs = [None, config(1000), config(1000), config(2000)]
        self.stages = FleetStages(PIPELINE, self.configs)
        self.client = FleetClient(self, self.own, ready_responses)

    async def told(self) -> Any:
        (message,) = await self.orchestrator.front_end.request_async_queue.get_batch()
        return message


@pytest.fixture
def head() -> Iterator[Head]:
    head = Head([[b""], [ready(500, 0), ready(500, 1)], [], [ready(700)]])
    yield head
    head.client.shutdown()


def test_the_replicas_of_all_stages_have_labels_of_their_own(head: Head) -> None:
    assert head.client.engine_ranks_managed == [0, 10_000, 10_001, 30_000]


def test_each_configuration_has_the_sizes_that_engines_of_its_own_stage_reported(head: Head) -> None:
    lengths = [config and config.model_config.max_model_len for config in (head.own, *head.configs)]
    assert lengths == [500, None, 500, 1000, 700]
    assert head.own.cache_config.num_gpu_blocks == 200


async def test_the_first_replica_of_a_stage_that_had_none_completes_its_configuration_once(head: Head) -> None:
    for replica_id in range(2):
        head.orchestrator.front_end.output_async_queue.put(ReplicaJoined(2, replica_id, ready(300, replica_id)))
    head.orchestrator.front_end.output_async_queue.put(EngineApi().idle_report(0))
    await head.client.get_output_async()
    cache, model = head.configs[2].cache_config, head.configs[2].model_config
    assert (cache.num_gpu_blocks, model.max_model_len, head.own.model_config.max_model_len) == (100, 300, 500)


@pytest.mark.parametrize(
    ("asked", "args", "told", "stages"),
    [
        ("sleep", (), (1, "abort"), ALL),
        ("sleep", (2, "keep"), (2, "keep"), ALL),
        ("wake_up", (), (None,), ALL),
        ("wake_up", (["weights"],), (["weights"],), ALL),
        ("pause_scheduler", (), ("abort", True), ALL),
        ("pause_scheduler", ("keep", False), ("keep", False), ALL),
        *([("pause_generation", (), ("abort", True), ALL)] if PAUSE_REFUSES.applies else ()),
        ("resume_scheduler", (), (), ALL),
        ("profile", (), (True, None, None, None), ALL),
        ("profile", (False, "trace", 1, 2), (False, "trace", 1, 2), ALL),
        ("profile", (True, "trace", 1, 2, {"of": "torch"}), (True, "trace", 1, 2, {"of": "torch"}), ALL),
        ("reset_prefix_cache", (), (False, False), ALL),
        ("reset_prefix_cache", (True, False), (True, False), ALL),
        ("reset_prefix_cache", (False, True), (False, True), ALL),
        ("reset_mm_cache", (), (), ALL),
        ("reset_encoder_cache", (), (), ALL),
        ("release_kv_cache_memory", (), (), ALL),
        ("add_lora", (LoRARequest("name", 1, "path"),), (Adapter("name", 1, "path"),), (1,)),
        ("remove_lora", (1,), (1,), (1,)),
        ("forget_lora", (1,), (1,), (1,)),
        ("list_loras", (), (), (1,)),
        ("pin_lora", (1,), (1,), (1,)),
        ("set_weight_version", ("v",), ("v",), (1, 2)),
        ("get_weight_version", (), (), (1, 2)),
        ("collective_rpc", ("start_weight_update",), ("start_weight_update", None, (), {}), (1, 2)),
        ("collective_rpc", ("m", 3.0, (1,), {"k": 2}), ("m", 3.0, (1,), {"k": 2}), (1, 2)),
        ("compute_weight_checksums", (), (), (1, 2)),
        ("is_sleeping", (), (), (1,)),
        ("is_scheduler_paused", (), (), (1,)),
    ],
)
async def test_a_call_reaches_its_stages_unchanged_and_can_be_sent_to_other_heads(
    head: Head, asked: str, args: tuple[Any, ...], told: tuple[Any, ...], stages: tuple[int, ...] | None
) -> None:
    async def answer() -> None:
        (message,) = await head.orchestrator.rpc_async_queue.get_batch()
        assert isinstance(message, CallReplicas)
        assert (message.method, message.args, message.stages) == (asked, told, stages)
        can_be_told = encode(message.method, message.args) is not None
        assert can_be_told or message.method == FORGET_LORA or not leaves_state(message.method, message.args)
        assert message.method in ALLOWED_CALLS | HEAD_CALLS
        message.reply.set_result([set()])

    async with asyncio.timeout(10):
        await asyncio.gather(getattr(head.client, f"{asked}_async")(*args), answer())


async def start_app(head: Head, options: OmniConfig, args: Any = None) -> FastAPI:
    """What we add to vLLM's application, at the start of a server with these options."""
    store_options(engine_config := SimpleNamespace(additional_config=None), options)
    endpoints, app = FleetEndpoints(), FastAPI()
    app.state.args = SimpleNamespace(
        api_key=None,
        uds=None,
        omni_admin_key_file=options.admin_key_file,
        omni_admin_loopback=options.admin_loopback,
        **{LOCAL_ADMIN_KEY: "a key that nobody needs"},
    )
    app.state.openai_serving_chat = app.state.openai_serving_completion = None
    endpoints.attach_router(app)
    await endpoints.init_state(SimpleNamespace(engine_core=head.client, vllm_config=engine_config), app.state, args)
    return app


@pytest.mark.parametrize(
    ("mode", "loopback", "warning"),
    [
        (None, True, "With --omni-admin-loopback"),
        (None, False, None),
        (0o640, False, "others may access it; run `chmod 600`"),
        (0o600, False, None),
    ],
)
async def test_the_start_warns_of_who_may_change_the_fleet(
    head: Head,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    mode: int | None,
    loopback: bool,
    warning: str | None,
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("0123456789abcdef")
    keys.chmod(mode or 0o600)
    with caplog.at_level(logging.WARNING, "vllm"):
        await start_app(head, OmniConfig(admin_key_file=None if mode is None else str(keys), admin_loopback=loopback))
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == (warning is not None)
    assert all(warning in line for line in told if warning is not None)


@pytest.mark.parametrize("servers", [1, 2])
async def test_only_a_single_server_handles_a_second_signal(head: Head, servers: int) -> None:
    args = SimpleNamespace() if servers == 1 else SimpleNamespace(**{SHARED_DRAIN_FLAG: bytearray(1)})
    app = await start_app(head, OmniConfig(), args)
    handler: asyncio.Task[None] | None = getattr(app.state, "omni_second_signal", None)
    assert (handler is not None) == (servers == 1)
    if handler is not None:
        handler.cancel()


async def test_leaving_a_call_aborts_all_of_it_and_vllms_own_abort_what_answers(head: Head) -> None:
    head.client.abort_requests(["a", "b"])
    assert await head.told() == AbortRequests(("a", "b"), whole=True)
    await head.client.abort_requests_async(["a"])
    assert await head.told() == AbortRequests(("a",), whole=False)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NoReplicaError("later"), 503),
        (StageInputError("Stage 'talker': the input is too long"), 400),
        (StageError("Stage 'talker': its transform failed"), 500),
        (ReplicaError("gone"), 500),
        (MessageTooLargeError("too large"), 413),
    ],
)
def test_an_error_has_the_status_that_tells_whose_it_is(error: Exception, status: int) -> None:
    told: Any = to_http(error)
    assert (str(told), told.http_status) == (str(error), status)
