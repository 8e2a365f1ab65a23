"""A head with local replicas whose engines, clock and pauses a test controls."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeEngineApi, FakeOutputs, FakeRequest, FakeResult, FakeUtilityOutput
from tests.fakes.engines import UNPROBED, FakeEngine, FakeLauncher, Plan
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.orchestrator import FleetControl, Orchestrator, StagePool
from vllm_omni_plugin.orchestrator.attachment.local_replicas import LocalReplicas, LocalStage
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadRules
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.multi_stage.input_builder import StageInputBuilder
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import SubmitRequest
from vllm_omni_plugin.pipeline import Pipeline
from vllm_omni_plugin.replicas.engine.engine_keeper import Timing

UP = ReplicaStatus.UP
EACH_START_FAILURE = pytest.mark.parametrize(
    ("plan", "error", "text"),
    [
        (Plan(refuse="no such model"), ReplicaError, "no such model"),
        (Plan(spawn_error=OSError("no memory")), OSError, "no memory"),
    ],
    ids=["handshake fails", "spawn fails"],
)


class Node:
    """Local replicas whose engines, clock and pauses the test controls: two, or so many of each stage of a pipeline.

    Args:
        heartbeats: their interval and timeout.

    Attributes:
        pauses: the pauses that were asked for before restarts, in seconds.
        go_on: a permit for each pause to end.
    """

    def __init__(
        self,
        make_launcher: type[FakeLauncher] = FakeLauncher,
        counts: Sequence[int] = (2,),
        pipeline: Pipeline | None = None,
        heartbeats: tuple[float, float] = UNPROBED,
        stall_timeout: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.go_on = asyncio.Semaphore(0)
        self.launchers = [make_launcher() for _ in counts]
        self.pools = [
            StagePool(stage_id, LeastQueueLengthBalancer(), clock=lambda: self.now) for stage_id in range(len(counts))
        ]
        self.launcher, self.pool = self.launchers[0], self.pools[0]
        apis: Any = [FakeEngineApi() for _ in counts]
        input_builder = None if pipeline is None else StageInputBuilder(pipeline, apis, str)
        self.orchestrator = Orchestrator(
            self.pools,
            apis,
            HeadRules(3, stall_timeout=stall_timeout),
            lambda: self.now,
            input_builder=input_builder,
        )
        stages = [
            LocalStage(stage_id, count, self.launchers[stage_id], apis[stage_id])
            for stage_id, count in enumerate(counts)
        ]
        timing = Timing(*heartbeats, lambda: self.now, self._pause)
        self.replicas = LocalReplicas(self.orchestrator, stages, timing)

    async def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await self.go_on.acquire()

    @property
    def statuses(self) -> list[ReplicaStatus]:
        return [member.status for member in self.pool.members]

    def engine_of(self, replica_id: int) -> FakeEngine:
        address = self.pool.member(replica_id).input_addr
        return next(engine for engine in reversed(self.launcher.engines) if engine.input_addr == address)

    def submit(self, request: FakeRequest) -> None:
        self.orchestrator.front_end.request_async_queue.put(SubmitRequest(request, 0.0))

    async def until_statuses(self, *statuses: ReplicaStatus) -> None:
        await eventually(lambda: self.statuses == list(statuses), f"{statuses}")

    async def until_back(self, replica_id: int, restarts: int) -> None:
        """Return when a replica serves after its so-many-th restart."""
        member = self.pool.member(replica_id)
        await eventually(lambda: member.restarts == restarts and member.status is UP, f"restart {restarts}")

    async def close(self) -> None:
        """End the engines, and what the launcher holds of them."""
        await self.replicas.close(0.0)
        for launcher in self.launchers:
            assert all(engine.process.ended for engine in launcher.engines)
            launcher.close()


@asynccontextmanager
async def running_node(*args: Any) -> AsyncIterator[Node]:
    """A node whose orchestrator runs until the block ends; the test starts the replicas."""
    node = Node(*args)
    running = asyncio.create_task(FleetControl(node.orchestrator, FleetCalls(node.orchestrator)).run())
    yield node
    await node.close()
    node.orchestrator.close_queues()
    await running


async def received(engine: FakeEngine) -> tuple[str, Any]:
    """What kind of message the engine is sent next, and its content."""
    await eventually(lambda: engine.connected)
    kind, body = await asyncio.to_thread(engine.receive)
    return kind.decode(), msgspec.json.decode(body)


async def answer(engine: FakeEngine, method: str, result: object = None) -> list[Any]:
    """The engine answers the next call, which must be this one; returns its arguments."""
    _, (call_id, called, args) = await received(engine)
    assert called == method
    engine.say(msgspec.json.encode(FakeOutputs(utility_output=FakeUtilityOutput(call_id, None, FakeResult(result)))))
    return list(args)
