"""Replicas of a Python stage under the orchestrator: balanced, moved and restarted like those of vLLM's engine."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.fakes.conditions import eventually
from tests.stages.gate import Gate
from tests.stages.heads import END_TOKEN, source, stage
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.orchestrator import Orchestrator, StagePool, StageRun
from vllm_omni_plugin.orchestrator.attachment.local_replicas import LocalReplicas, LocalStage
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import SubmitRequest
from vllm_omni_plugin.pipeline import StageInput, StageOutput
from vllm_omni_plugin.replicas.engine.engine_keeper import Timing
from vllm_omni_plugin.stages.api import PythonStageApi
from vllm_omni_plugin.stages.stage_process import PythonStageLauncher, StageProcess

STAGE = stage()


async def no_pause(seconds: float) -> None:
    """Restarts happen at once."""


class DirectApi(PythonStageApi):
    """Makes the stage's request from the client's, since there is no earlier stage."""

    def make_movable(self, request: Any) -> Any:
        return self.build(request, request.given, {}, for_client=False)


class Launcher(PythonStageLauncher):
    def __init__(self) -> None:
        super().__init__(STAGE, lambda pid: None)
        self.pids: dict[int, int] = {}

    def start(self, replica_id: int) -> StageProcess:
        starting = super().start(replica_id)
        self.pids[replica_id] = starting.pid
        return starting


class Fleet:
    def __init__(self) -> None:
        self.launcher = Launcher()
        self.api = DirectApi(STAGE, lambda tokens: "", lambda text: (), END_TOKEN)
        self.pool = StagePool(0, LeastQueueLengthBalancer())
        self.orchestrator = Orchestrator([self.pool], [self.api], 3, time.monotonic)
        stage = LocalStage(0, 2, self.launcher, self.api)
        self.replicas = LocalReplicas(self.orchestrator, [stage], Timing(1.0, 10.0, time.monotonic, no_pause))

    def submit(self, request_id: str, given: StageInput) -> None:
        request = source(request_id, given=given, mm_features=None, resumable=False, priority=0, prompt_token_ids=[])
        self.orchestrator.front_end.request_async_queue.put(SubmitRequest(request, time.monotonic()))

    async def run_of(self, request_id: str) -> StageRun:
        states = self.orchestrator.request_states
        await eventually(lambda: request_id in states and states[request_id].runs[0].attempts)
        return states[request_id].runs[0]

    async def answers(self, *request_ids: str) -> list[StageOutput]:
        said: dict[str, Any] = {}
        while len(said) < len(request_ids):
            for outputs in await self.orchestrator.front_end.output_async_queue.get_batch():
                said |= {output.request_id: output for output in getattr(outputs, "outputs", ())}
        return [self.api.reader(None).read(said[request_id], ended=True) for request_id in request_ids]


@pytest.fixture
async def fleet() -> AsyncIterator[Fleet]:
    fleet = Fleet()
    running = asyncio.create_task(fleet.orchestrator.run())
    await fleet.replicas.start()
    yield fleet
    await fleet.replicas.close(2.0)
    fleet.orchestrator.close_queues()
    await running


async def test_a_request_moves_when_its_replica_is_killed_and_the_replica_comes_back(fleet: Fleet, gate: Gate) -> None:
    fleet.submit("a", gate.job)
    run = await fleet.run_of("a")
    assert run.replica_id is not None
    lost, victim = fleet.pool.member(run.replica_id), fleet.launcher.pids[run.replica_id]
    assert lost is not None
    await gate.reached()
    os.kill(victim, signal.SIGKILL)
    await eventually(lambda: run.attempts == 2)
    await gate.reached()
    gate.release()
    (answer,) = await fleet.answers("a")
    assert (answer.text, answer.metadata["pid"] == victim) == ("slow!", False)
    await eventually(lambda: lost.restarts == 1 and lost.status is ReplicaStatus.UP)
    assert fleet.launcher.pids[lost.replica_id] != victim
