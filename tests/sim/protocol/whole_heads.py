"""Whole heads in front of replica servers with simulated engines: orchestrator, attachment, and a session."""

import asyncio
import itertools
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple

from tests.fakes.conditions import eventually
from tests.sim.protocol.heads import FAST
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer
from vllm_omni_plugin.coordinator import OmniCoordClientForHead, OmniCoordinator, ReplicaWork, generation_of
from vllm_omni_plugin.orchestrator import FleetControl, Orchestrator, PoolMember, SessionListener, StagePool
from vllm_omni_plugin.orchestrator.attachment.remote_replicas import RemoteReplicas
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadRules
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.multi_stage.input_builder import StageInputBuilder
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolTraits
from vllm_omni_plugin.orchestrator.pool.work_exchange import WorkExchange
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import AbortRequests, RequestFailed, SubmitRequest
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError
from vllm_omni_plugin.replicas.remote.remote_replica import AttachSettings
from vllm_omni_plugin.replicas.replica_server.descriptor_limits import raise_limits
from vllm_omni_plugin.replicas.replica_server.replica_server import ReplicaServer
from vllm_omni_plugin.replicas.replica_server.server_settings import ServerSettings
from vllm_omni_plugin.sim import EngineSettings
from vllm_omni_plugin.sim.sim_launcher import EngineHost, SimLauncher
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import ready_response
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi

FINGERPRINT = {"model": "simulated"}
ONE_STAGE = {0: FINGERPRINT}
INTERVAL, TIMEOUT = 0.1, 10.0
SETTINGS = replace(FAST, max_num_seqs=16, max_model_len=100_000, kv_blocks=1_000_000)


class WholeHead:
    """A head process without AsyncLLM, as an asynchronous context manager; `produced` counts tokens by request.

    `tokens` are those of the requests that ended. It waits at its start until so many `replicas` are attached.
    """

    def __init__(
        self,
        coordinator: str,
        head_id: str,
        replicas: int,
        fingerprints: Mapping[int, Mapping[str, str]] = ONE_STAGE,
        pipeline: StageInputBuilder | None = None,
    ) -> None:
        self._replicas = replicas
        self.produced: Counter[str] = Counter()
        self.tokens: defaultdict[str, list[int]] = defaultdict(list)
        self.ended: dict[str, Any] = {}
        self.statistics: Any = None
        self._exchange = WorkExchange(self._report)
        traits = PoolTraits(exchange=self._exchange)
        self.pools = [StagePool(stage_id, LeastQueueLengthBalancer(), traits=traits) for stage_id in fingerprints]
        self.pool = self.pools[0]
        apis = [EngineApi()] if pipeline is None else pipeline.apis
        self.orchestrator = Orchestrator(self.pools, apis, HeadRules(3), time.monotonic, input_builder=pipeline)
        self.fleet_calls = FleetCalls(self.orchestrator, head_id, lambda: self._client)
        settings = AttachSettings(dict(enumerate(apis)), head_id, fingerprints, INTERVAL, TIMEOUT)
        self._remote = RemoteReplicas(self.orchestrator, self.fleet_calls, settings)
        self._client = OmniCoordClientForHead(
            coordinator,
            head_id,
            SessionListener(self.orchestrator.rpc_async_queue),
            generation=generation_of(fingerprints),
        )
        self._more = asyncio.Event()

    async def __aenter__(self) -> "WholeHead":
        control = FleetControl(self.orchestrator, self.fleet_calls, self._remote, self._exchange)
        self._tasks = [asyncio.create_task(control.run()), asyncio.create_task(self._read())]
        await eventually(
            lambda: sum(member.client is not None for pool in self.pools for member in pool.members) >= self._replicas,
            "all replicas are attached",
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self._client.close)
        await self._remote.close()
        self.orchestrator.close_queues()
        await asyncio.gather(*self._tasks)

    @property
    def member(self) -> PoolMember:
        return self.pool.members[0]

    def submit(self, *requests: Any) -> None:
        for request in requests:
            self.orchestrator.front_end.request_async_queue.put(SubmitRequest(request, time.monotonic()))

    def abort(self, *request_ids: str) -> None:
        self.orchestrator.front_end.request_async_queue.put(AbortRequests(request_ids))

    async def more(self) -> None:
        """Return once there are new outputs."""
        async with asyncio.timeout(10):
            await self._more.wait()
        self._more.clear()

    def forget(self) -> None:
        self.produced.clear()
        self.ended.clear()

    def _report(self, work: Sequence[ReplicaWork], full: bool) -> None:
        self._client.report_work(work, full=full)

    async def _read(self) -> None:
        while True:
            try:
                for item in await self.orchestrator.front_end.output_async_queue.get_batch():
                    self._note(item)
            except QueueClosedError:
                return
            self._more.set()

    def _note(self, item: Any) -> None:
        if isinstance(item, RequestFailed):
            self.ended[item.request_id] = item.error
        for output in getattr(item, "outputs", ()):
            self.produced[output.request_id] += len(output.new_token_ids)
            self.tokens[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.ended[output.request_id] = str(output.finish_reason)
        self.statistics = getattr(item, "scheduler_stats", None) or self.statistics


class NewHead(NamedTuple):
    """Makes heads for these replica servers."""

    servers: Sequence[ReplicaServer]
    make: Callable[[], WholeHead]

    def __call__(self) -> WholeHead:
        return self.make()


@asynccontextmanager
async def open_site() -> AsyncIterator[NewHead]:
    """A coordinator, and one replica server with a simulated engine; makes their heads."""
    coordinator = OmniCoordinator("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    try:
        async with open_nodes(coordinator.router_zmq_addr) as new_head:
            yield new_head
    finally:
        coordinator.close()


@asynccontextmanager
async def open_nodes(
    coordinator: str,
    replicas: int = 1,
    engine_settings: EngineSettings = SETTINGS,
    fingerprint: Mapping[str, str] = FINGERPRINT,
    stage_id: int = 0,
) -> AsyncIterator[NewHead]:
    """Replica servers with a simulated engine each; makes their heads, of one stage."""
    names = map("head-{} of ".format, itertools.count())
    generation = {0: fingerprint}
    settings = ServerSettings("127.0.0.1", None, coordinator, stage_id, INTERVAL, TIMEOUT, 5.0, None, fingerprint)
    raise_limits(replicas)
    with EngineHost() as host, ThreadPoolExecutor(2 * replicas) as executor:
        launcher = SimLauncher(host, engine_settings, ready_response)
        servers = [ReplicaServer(settings, launcher, index, EngineApi(), executor) for index in range(replicas)]
        running = [asyncio.create_task(server.run()) for server in servers]
        try:
            yield NewHead(
                servers,
                lambda: WholeHead(coordinator, next(names) + generation_of(generation), replicas, generation),
            )
        finally:
            for server in servers:
                server.stop_now("the test is over")
            await asyncio.gather(*running)
