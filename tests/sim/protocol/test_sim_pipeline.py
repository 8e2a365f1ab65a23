"""A head with two stages of simulated engines with different vocabularies, as AsyncLLM uses it."""

import asyncio
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from tests.contract.stage_models import REVERSED, WORDS, config, model, source
from tests.fakes.conditions import eventually
from tests.sim.drive import answer
from tests.sim.drive import request as sim_request
from tests.sim.protocol.heads import FAST
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.integration.engine_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.fleet_setup import fleet as fleet_module
from vllm_omni_plugin.integration.fleet_setup.fleet import Fleet
from vllm_omni_plugin.integration.fleet_setup.stage_planning import StagePlan
from vllm_omni_plugin.pipeline.stage import VLLM_ENGINE, Modality, Stage
from vllm_omni_plugin.replicas.engine.engine_start import Launcher
from vllm_omni_plugin.sim.sim_launcher import EngineHost, SimLauncher
from vllm_omni_plugin.vllm_api.launch.model_fingerprint import fingerprint
from vllm_omni_plugin.vllm_api.protocol.sim_protocol import ready_response
from vllm_omni_plugin.vllm_api.stages.stage_requests import VllmStageApi

SETTINGS = replace(FAST, max_model_len=32, vocabulary_size=len(WORDS))
THINKER = Stage(0, "thinker", VLLM_ENGINE, Modality.TEXT, "m", sampling={"max_tokens": 3, "temperature": 0})
REFINER = Stage(1, "refiner", VLLM_ENGINE, Modality.TEXT, "n", inputs=("thinker",), replicas=2, final=True)
PROMPT, LENGTH = (1, 3, 4), 4
END, BEGIN = 0, 1
SPECIAL = WORDS[:3]


class Head:
    """The fleet and its client; `outputs` are those that AsyncLLM was given."""

    def __init__(self, folder: Path, host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
        # `Fleet` sets it for good.
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        self.configs = [config(model(folder / "thinker")), config(model(folder / "refiner", REVERSED))]
        self.launchers = [
            SimLauncher(host, SETTINGS, lambda replica_id, own=own: ready_response(own, replica_id, 64, 4))
            for own in self.configs
        ]
        monkeypatch.setattr(fleet_module, "stage_plans", lambda *_: tuple(map(self._plan, (THINKER, REFINER))))
        self.client: FleetClient | None = None
        self.outputs: list[Any] = []

    def start(self) -> FleetClient:
        fleet = Fleet(OmniConfig(), self.configs[0], None, log_stats=True)
        self.client = FleetClient(fleet, self.configs[0], fleet.start())
        return self.client

    def _plan(self, stage: Stage) -> StagePlan:
        own = self.configs[stage.id]

        def make_launcher(*_: Any) -> Launcher:
            return self.launchers[stage.id]

        return StagePlan(
            stage_id=stage.id,
            stage=stage,
            replicas=stage.replicas,
            policy=stage.policy,
            policy_config=None,
            make_launcher=make_launcher,
            api=VllmStageApi(own, self.configs[0], stage),
            fingerprint=fingerprint(own, stage.id),
            vllm_config=own,
            lockstep=False,
        )

    async def ask(self, request_id: str) -> list[int]:
        assert self.client is not None
        await self.client.add_request_async(asked(request_id))
        tokens: list[int] = []
        async with asyncio.timeout(20):
            while True:
                batch = await self.client.get_output_async()
                self.outputs.append(batch)
                for output in batch.outputs:
                    assert output.request_id == request_id
                    tokens += output.new_token_ids
                    if output.finish_reason is not None:
                        return tokens


def asked(request_id: str) -> Any:
    params = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
    return source(PROMPT, params, request_id=request_id)


def by_hand() -> list[int]:
    """The answer of the second model to the text of the first one, from one engine of each."""
    thought = [WORDS[token] for token in said(PROMPT, 3, END)]
    return said([BEGIN, *(REVERSED.index(word) for word in thought if word not in SPECIAL)], LENGTH, None)


def said(prompt: Iterable[int], max_tokens: int, eos_token_id: int | None) -> list[int]:
    return answer(sim_request("r", prompt, max_tokens, eos_token_id=eos_token_id), SETTINGS)


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    with EngineHost() as host:
        head = Head(tmp_path, host, monkeypatch)
        yield head
        if head.client is not None:
            head.client.shutdown(0.0)
        assert all(process.ended for launcher in head.launchers for process in launcher.processes.values())


async def test_an_answer_is_that_of_single_engines_chained_by_hand(head: Head) -> None:
    client = head.start()
    assert client.engine_ranks_managed == [0, 10_000, 10_001]
    assert await head.ask("a") == by_hand()
    assert len(by_hand()) == LENGTH
    front = {batch.engine_index for batch in head.outputs if batch.outputs}
    assert front <= {10_000, 10_001}


async def test_tasks_and_calls_come_from_the_engines_of_their_stages(head: Head) -> None:
    client = head.start()
    assert await client.get_supported_tasks_async() == ("generate",)
    assert len(await client.compute_weight_checksums_async()) == 1
    await client.sleep_async()
    engines = [process.engine for launcher in head.launchers for process in launcher.processes.values()]
    assert len(engines) == 3
    assert await client.is_sleeping_async()
    assert await client.wake_up_async()
    assert await head.ask("a") == by_hand()


@pytest.mark.parametrize("stage_id", [0, 1])
async def test_a_replica_that_dies_comes_back_in_its_stage(head: Head, stage_id: int) -> None:
    client = head.start()
    pool = client.orchestrator.stage_pools[stage_id]
    head.launchers[stage_id].processes[0].kill()
    await eventually(lambda: pool.member(0).restarts == 1 and len(pool.serving) == len(pool.members), "its return")
    assert await head.ask("a") == by_hand()


async def test_a_stage_whose_engine_does_not_start_ends_the_start_of_all(head: Head) -> None:
    def refuse(replica_id: int) -> Any:
        raise ReplicaError("it cannot load its model")

    head.launchers[1].start = refuse  # type: ignore[method-assign]
    with pytest.raises(ReplicaError, match="stage 1: it cannot load its model"):
        head.start()
