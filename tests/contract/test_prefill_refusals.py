"""A request that is refused before its prefill: vLLM's HTTP server, two stages, and engines that say nothing."""

import time
from pathlib import Path
from typing import Any

import pytest

from tests.contract.http_server import http_server
from tests.contract.stage_models import model
from tests.fakes.conditions import eventually
from tests.fakes.links import FakeLink
from tests.fakes.played_fleet import PlayedFleet
from vllm_omni_plugin.admission import AdmissionConfig
from vllm_omni_plugin.balancing import RandomBalancer
from vllm_omni_plugin.orchestrator import Orchestrator, StagePool
from vllm_omni_plugin.orchestrator.multi_stage.input_builder import StageInputBuilder
from vllm_omni_plugin.orchestrator.pool.send_window import SendWindow
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolTraits
from vllm_omni_plugin.pipeline import Modality, Pipeline, Stage
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import ready_response
from vllm_omni_plugin.vllm_api.vllm_stages.stage_requests import VllmStageApi

# vLLM reads fields of its own that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

PIPELINE = Pipeline(
    (
        Stage(0, "prefill", "vllm", Modality.KV_CACHE, model="m"),
        Stage(1, "decode", "vllm", Modality.TEXT, model="m", inputs=("prefill",), final=True),
    )
)
PATIENCE_S = 0.2
"""Seconds that a client waits whose request cannot start."""


class SilentLink(FakeLink):
    """An engine that gets requests and says nothing.

    Attributes:
        got: messages that it got.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.got = 0

    def send(self, frames: Any) -> None:
        self.got += 1


class Fleet(PlayedFleet):
    """A replica of each stage, which get one request to begin and one behind it.

    Attributes:
        links: to the engines, by stage.
    """

    def __init__(self, config: Any) -> None:
        apis = [VllmStageApi(config, config, stage) for stage in PIPELINE.stages]
        pools = [
            StagePool(stage.id, RandomBalancer(), traits=PoolTraits(send_window=SendWindow(limited=True)))
            for stage in PIPELINE.stages
        ]
        input_builder = StageInputBuilder(PIPELINE, apis, str)
        self.orchestrator = Orchestrator(
            pools, apis, 0, time.monotonic, input_builder=input_builder, admission_config=AdmissionConfig()
        )
        self.links = [SilentLink(stage.name) for stage in PIPELINE.stages]
        for pool, link, api in zip(pools, self.links, apis, strict=True):
            self.serve(pool.add(), link, api, ready_response(0, num_gpu_blocks=100, block_size=16))


async def test_a_request_that_does_not_start_in_time_gets_503_and_costs_no_prefill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets: list[Fleet] = []

    def orchestrator_of(config: Any) -> Orchestrator:
        fleets.append(Fleet(config))
        return fleets[0].orchestrator

    where = model(tmp_path / "model")
    async with http_server(where, monkeypatch, ("generate",), orchestrator_of=orchestrator_of) as server, fleets[0]:
        body = {"prompt": "red green blue", "max_tokens": 4}
        begun = [server.post("/v1/completions", **body) for _ in range(2)]
        prefill, decode = fleets[0].links
        await eventually(lambda: prefill.got == len(begun), "the prefills of those before it")
        late = server.post("/v1/completions", PATIENCE_S, **body)
        assert await late.status() == 503
        assert late.error["message"] == "The request has waited as long as it may."
        assert int(late.headers["retry-after"]) >= 1
        assert (prefill.got, decode.got) == (len(begun), 0)
        for client in begun:
            client.disconnect()
            await client.request
