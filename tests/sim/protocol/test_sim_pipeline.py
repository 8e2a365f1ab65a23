"""A head with two stages of simulated engines with different vocabularies, as AsyncLLM uses it."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams

from tests.contract.stage_models import REVERSED, WORDS, config, model, source
from tests.fakes.conditions import eventually
from tests.pipeline.scenarios import cases
from tests.sim.drive import answer
from tests.sim.drive import request as sim_request
from tests.sim.protocol.heads import FAST
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.fleet_setup import fleet as fleet_module
from vllm_omni_plugin.integration.fleet_setup.fleet import Fleet
from vllm_omni_plugin.integration.fleet_setup.stage_planning import StagePlan
from vllm_omni_plugin.pipeline import VLLM_ENGINE, Modality, Stage
from vllm_omni_plugin.replicas.engine.engine_start import Launcher
from vllm_omni_plugin.sim import EngineModel, EngineSettings, Step
from vllm_omni_plugin.sim.sim_launcher import EngineHost, SimLauncher, SimProcess
from vllm_omni_plugin.vllm_api.codecs.sim_protocol import ready_response
from vllm_omni_plugin.vllm_api.launch.model_fingerprint import fingerprint
from vllm_omni_plugin.vllm_api.vllm_stages.stage_requests import VllmStageApi

SETTINGS = replace(FAST, max_model_len=32, vocabulary_size=len(WORDS))
THINKER = Stage(0, "thinker", VLLM_ENGINE, Modality.TEXT, "m", sampling={"max_tokens": 3, "temperature": 0})
REFINER = Stage(1, "refiner", VLLM_ENGINE, Modality.TEXT, "n", inputs=("thinker",), replicas=2, final=True)
PROMPT, LENGTH = (1, 3, 4), 4
END, BEGIN = 0, 1
SPECIAL = WORDS[:3]


class HaltingModel(EngineModel):
    """Computes while the event is set."""

    def __init__(self, running: threading.Event) -> None:
        super().__init__(SETTINGS)
        self._gate = running

    def step(self, now: float) -> Step:
        return super().step(now) if self._gate.is_set() else Step([], now + 0.01)


class HaltingLauncher(SimLauncher):
    def __init__(self, host: EngineHost, running: threading.Event, respond: Callable[[int], bytes]) -> None:
        super().__init__(host, SETTINGS, respond)
        self.models: dict[int, HaltingModel] = {}
        self._gate = running
        running.set()

    def start(self, replica_id: int) -> SimProcess:
        model = self.models[replica_id] = HaltingModel(self._gate)
        identity, response = self.identity(replica_id), self.ready_response(replica_id)
        process = SimProcess(self.host, model, self.log_stats, identity, response)
        self.processes[replica_id] = process
        return process


class Head:
    """The fleet and its client; `outputs` are those that AsyncLLM was given."""

    stages: tuple[Stage, ...] = (THINKER, REFINER)
    vocabularies: tuple[Sequence[str], ...] = (WORDS, REVERSED)
    options = OmniConfig()

    def __init__(self, folder: Path, host: EngineHost, monkeypatch: pytest.MonkeyPatch) -> None:
        # `Fleet` sets it for good.
        monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
        self.configs = [
            config(model(folder / stage.name, words))
            for stage, words in zip(self.stages, self.vocabularies, strict=True)
        ]
        self.running = [threading.Event() for _ in self.configs]
        self.launchers = [
            HaltingLauncher(host, running, lambda replica_id, own=own: ready_response(own, replica_id, 64, 4))
            for own, running in zip(self.configs, self.running, strict=True)
        ]
        monkeypatch.setattr(fleet_module, "stage_plans", lambda *_: tuple(map(self._plan, self.stages)))
        self.client: FleetClient | None = None
        self.outputs: list[Any] = []
        self._numbers = count()

    def start(self) -> FleetClient:
        fleet = Fleet(self.options, self.configs[0], None, log_stats=True)
        self.client = FleetClient(fleet, self.configs[0], fleet.start())
        return self.client

    def _plan(self, stage: Stage) -> StagePlan:
        own = self.configs[stage.id]

        def make_launcher(*_: Any, **__: Any) -> Launcher:
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

    @property
    def pools(self) -> Any:
        assert self.client is not None
        return self.client.orchestrator.stage_pools

    async def ask(self) -> list[int]:
        return await (await self.submit()).answer()

    async def submit(self) -> "Call":
        assert self.client is not None
        params = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)
        request = source(PROMPT, params, request_id=f"r{next(self._numbers)}")
        await self.client.add_request_async(request)
        return Call(self, request.request_id)

    def expected(self) -> list[int]:
        return by_hand()

    async def check(self, answer: list[int]) -> None:
        assert answer == self.expected()
        assert len(answer) == LENGTH

    @asynccontextmanager
    async def halted_in(self, stage_id: int) -> AsyncIterator["Call"]:
        self.running[stage_id].clear()
        call = await self.submit()
        await eventually(lambda: self._busy(stage_id), f"a request in stage {stage_id}")
        yield call
        self.running[stage_id].set()

    def _busy(self, stage_id: int) -> list[int]:
        return [member.replica_id for member in self.pools[stage_id].members if member.queue_length]

    async def kill(self, stage_id: int) -> None:
        (replica_id,) = self._busy(stage_id)
        self.launchers[stage_id].processes[replica_id].kill()
        await eventually(lambda: self.pools[stage_id].member(replica_id).restarts, "another engine")

    async def rests(self) -> None:
        await eventually(lambda: all(pool.serving == pool.members for pool in self.pools), "all replicas serve")
        await eventually(lambda: not any(map(self._busy, range(2))), "no replica is charged")
        models = [model for launcher in self.launchers for model in launcher.models.values()]
        await eventually(lambda: not any(model.request_ids for model in models), "no engine has a request")


class Call:
    """A request on its way to a head."""

    def __init__(self, head: Head, request_id: str) -> None:
        self._head = head
        self._request_id = request_id

    async def answer(self) -> list[int]:
        tokens: list[int] = []
        assert self._head.client is not None
        async with asyncio.timeout(20):
            while True:
                batch = await self._head.client.get_output_async()
                self._head.outputs.append(batch)
                for output in batch.outputs:
                    assert output.request_id == self._request_id
                    tokens += output.new_token_ids
                    if output.finish_reason is not None:
                        return tokens

    async def leave(self) -> None:
        client = self._head.client
        assert client is not None
        await client.abort_requests_async([self._request_id])
        # Before the engine goes on: an output that comes earlier goes to the client, and is taken for the next answer.
        await eventually(lambda: self._request_id not in client.orchestrator.request_states, "its end")


def by_hand(thinker: EngineSettings = SETTINGS, refiner: EngineSettings = SETTINGS) -> list[int]:
    """The answer of the second model to the text of the first one, from one engine of each."""
    thought = [WORDS[token] for token in said(PROMPT, 3, END, thinker)]
    return said([BEGIN, *(REVERSED.index(word) for word in thought if word not in SPECIAL)], LENGTH, None, refiner)


def said(
    prompt: Iterable[int], max_tokens: int, eos_token_id: int | None, settings: EngineSettings = SETTINGS
) -> list[int]:
    return answer(sim_request("r", prompt, max_tokens, eos_token_id=eos_token_id), settings)


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    with EngineHost() as host:
        head = Head(tmp_path, host, monkeypatch)
        yield head
        if head.client is not None:
            head.client.shutdown(0.0)
        assert all(process.ended for launcher in head.launchers for process in launcher.processes.values())


@pytest.mark.parametrize(("scenario", "stage_id"), cases([0, 1]))
async def test_what_happens_to_a_request(head: Head, scenario: Any, stage_id: int) -> None:
    client = head.start()
    assert client.engine_ranks_managed == [0, 10_000, 10_001]
    await scenario(head, stage_id)
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
    await head.check(await head.ask())


async def test_a_stage_whose_engine_does_not_start_ends_the_start_of_all(head: Head) -> None:
    def refuse(replica_id: int) -> Any:
        raise ReplicaError("it cannot load its model")

    head.launchers[1].start = refuse  # type: ignore[method-assign]
    with pytest.raises(ReplicaError, match="stage 1: it cannot load its model"):
        head.start()
