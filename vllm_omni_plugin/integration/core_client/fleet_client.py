"""The engine-core client of AsyncLLM: passes requests and calls to the orchestrator, and outputs back."""

import asyncio
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_plugin.admin.http_admission import current_response
from vllm_omni_plugin.admin.metrics.fleet_metrics import FleetCollector
from vllm_omni_plugin.admin.metrics.multiprocess_metrics import MetricFiles, in_multiprocess_mode
from vllm_omni_plugin.admin.operator_actions import HeadDrain
from vllm_omni_plugin.admin.replica_header import new_chosen_replicas
from vllm_omni_plugin.errors import NoReplicaError, OmniError, ReplicaError
from vllm_omni_plugin.integration.core_client.fleet_events import FLEET_EVENTS, FleetEventHandler
from vllm_omni_plugin.integration.core_client.graceful_shutdown import GracefulShutdown
from vllm_omni_plugin.integration.core_client.pipeline_calls import register_request
from vllm_omni_plugin.integration.core_client.server_state_sync import ServerStateSync
from vllm_omni_plugin.integration.core_client.utility_calls import UtilityCallClient
from vllm_omni_plugin.integration.fleet_setup.fleet import Fleet
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.front_end import QueuedFrontEnd
from vllm_omni_plugin.orchestrator.pool.pool_member import engine_index
from vllm_omni_plugin.orchestrator.requests import orchestrator_messages as messages
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError
from vllm_omni_plugin.vllm_api.engine_messages.request_building import drop_transfers
from vllm_omni_plugin.vllm_api.launch.spawning import EXIT_TIMEOUT_S

logger = init_logger(__name__)

WAITING_NOTICE_S = 10.0
_YIELD_EVERY_S = 0.01
_NO_ELASTIC_EP = "Elastic expert parallelism does not apply to a fleet of --omni-* replicas."


class FleetClient(UtilityCallClient):
    """Implements vLLM's engine-core client for all replicas. Used on AsyncLLM's event loop, except where stated.

    It owns the started fleet, whose local `ready_responses` are by stage, and sets the values that engines determine at
    their start (KV blocks, ...) in AsyncLLM's `vllm_config`. Labels of replicas that join later are added to
    `engine_ranks_managed`. With `resources.engine_dead`, AsyncLLM never serves again; it stays False when all replicas
    are lost, since they come back.
    """

    def __init__(
        self,
        fleet: Fleet,
        vllm_config: Any,
        ready_responses: list[list[bytes]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(fleet.orchestrator, fleet.stages, fleet.worker_ranks)
        assert isinstance(fleet.orchestrator.front_end, QueuedFrontEnd)
        self._front_end = fleet.orchestrator.front_end
        self._fleet = fleet
        self.fleet_calls = fleet.fleet_calls
        self._events = FleetEventHandler(fleet.stages, vllm_config, ready_responses, self.abort_requests, self._send)
        self._received: deque[Any] = deque()
        self._clock = clock
        self._next_yield = -math.inf
        # vLLM labels engine 0 in any case.
        members = chain.from_iterable(pool.members for pool in self.orchestrator.stage_pools)
        self.engine_ranks_managed = [member.engine_index for member in members if not member.remote] or [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self.graceful_shutdown = GracefulShutdown()
        self.head_drain = HeadDrain(self.orchestrator.events)
        self.server_state: ServerStateSync = self._events.server_state
        self._shutting_down = False
        self._collector = FleetCollector(self.orchestrator)
        REGISTRY.register(self._collector)
        self._metric_files = MetricFiles(self._collector) if in_multiprocess_mode() else None
        # Engines must not outlive this process, even if nobody calls shutdown.
        self._finalizer = weakref.finalize(self, fleet.close)

    def bind(self, output_processor: Any, logger_manager: Any) -> None:
        self.graceful_shutdown.bind(output_processor)
        self._events.bind(output_processor, logger_manager, [pool.policy for pool in self.orchestrator.stage_pools])

    @property
    def can_finish_requests(self) -> bool:
        """Whether `shutdown`, called in this thread, would let requests finish: not if it runs on AsyncLLM's loop."""
        return bool(self._finalizer.alive) and self.graceful_shutdown.loop_in_other_thread

    async def until_serving(self) -> None:
        """Return once every stage that an ordinary request needs has a replica that accepts requests."""
        await self.orchestrator.serving_signal.wait(lambda: self.orchestrator.can_serve)

    def cancel_wait(self) -> None:
        self.graceful_shutdown.cancel_wait()
        self._fleet.cancel_wait()

    def shutdown(self, timeout: float | None = None) -> None:
        """Wait `timeout` seconds for requests, end the local replicas, then abort the rest. Idempotent; blocks."""
        if self._finalizer.detach() is None:
            return
        left = self.graceful_shutdown.wait_for_requests(self._fleet.wait_for_requests, timeout)
        REGISTRY.unregister(self._collector)
        if self._metric_files is not None:
            self._metric_files.close()
        self._shutting_down = True
        self._fleet.close(left if left is None else min(left, EXIT_TIMEOUT_S))
        self.graceful_shutdown.abort_all()
        self.resources.engine_dead = True

    async def get_output_async(self) -> Any:
        """The next `EngineCoreOutputs` of any replica. Handles the events before it."""
        queue = self._front_end.output_async_queue
        self.graceful_shutdown.outputs_processed()
        if self._received or len(queue):
            await self._yield_to_loop()
        while True:
            while self._received:
                item = self._received.popleft()
                if not isinstance(item, FLEET_EVENTS):
                    # AsyncLLM processes all of its outputs before it calls this method again.
                    self._events.sender = item.engine_index
                    return item
                self._events.handle(item)
            try:
                self._received.extend(await queue.get_batch())
            except QueueClosedError:
                if self._shutting_down:
                    # AsyncLLM cancels the waiting task. An error would be logged as an engine failure.
                    await asyncio.get_running_loop().create_future()
                self.resources.engine_dead = True
                raise EngineDeadError from None

    async def _yield_to_loop(self) -> None:
        """Yield to the other tasks of AsyncLLM's loop every 10 ms.

        While engines are faster than AsyncLLM there are always outputs, and HTTP would starve. Yielding for every
        message would cost throughput: outputs of a request between two yields go to its client as one event.
        """
        if self._clock() >= self._next_yield:
            await asyncio.sleep(0)
            self._next_yield = self._clock() + _YIELD_EVERY_S

    async def add_request_async(self, request: Any) -> None:
        """Submit a request or a session's next part; new ones are refused while the head ends, or as admission said."""
        call = None
        if self.stages.pipeline is not None:
            # Only the pipeline sets the parameters of KV transfers.
            drop_transfers(request)
            call = register_request(request.request_id)
        # A further part of a streaming session is not new, unless the orchestrator has not taken the first part yet.
        if self.graceful_shutdown.ending and request.request_id not in self.orchestrator.request_states:
            self.graceful_shutdown.refuse(request.request_id, call)
            self.abort_requests([request.request_id])
            return
        chosen_replicas = new_chosen_replicas()
        spans = self._events.spans
        if spans is not None:
            chosen_replicas = spans.expect(request.request_id, chosen_replicas)
        now, answer, terms = self._clock(), current_response(), None
        if answer is not None:
            if answer.refusal is not None:
                self._give_up(request.request_id, call, answer.refusal)
                return
            terms = answer.add_request(request.request_id, now)
            self._events.responses[request.request_id] = answer
        message = messages.SubmitRequest(request, now, chosen_replicas, call, traced=spans is not None, terms=terms)
        try:
            self._front_end.request_async_queue.put(message)
        except QueueClosedError:
            raise EngineDeadError from None

    def _give_up(self, request_id: str, call: messages.PipelineCall | None, error: OmniError) -> None:
        self._events.forget(request_id)
        if call is not None:
            call.put(messages.PipelineCallEnded(error))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Abort requests. Of a pipeline call, abort only the stages that answer through vLLM's server."""
        self.abort_requests(request_ids, whole=False)

    def abort_requests(self, request_ids: Sequence[str], whole: bool = True) -> None:
        """Abort these requests of AsyncLLM, if `whole` in all stages. Never blocks."""
        self.graceful_shutdown.outputs_processed()
        if request_ids:
            self._send(messages.AbortRequests(tuple(request_ids), whole))

    def _send(self, message: messages.RequestMessage) -> None:
        with suppress(QueueClosedError):
            self._front_end.request_async_queue.put(message)

    async def get_supported_tasks_async(self) -> Any:
        """The model's tasks. vLLM's server calls this at its start; waits for replicas, which may be asleep: only a
        server that has started can wake them."""
        while True:
            try:
                async with asyncio.timeout(WAITING_NOTICE_S):
                    await self.orchestrator.serving_signal.wait(lambda: self.orchestrator.has_replicas)
            except TimeoutError:
                logger.info("Waiting for the first replica to join. The server starts as soon as there is one.")
                continue
            try:
                # The prefill stage may have no replica while the decode stage, of the same model, serves.
                tasks = await super().get_supported_tasks_async()
                return self.stages.supported(tasks)
            except (NoReplicaError, ReplicaError):
                # If the first replica has been lost again, wait for the next one.
                if self.orchestrator.has_replicas:
                    raise

    async def add_lora_async(self, lora_request: Any) -> Any:
        """Load an adapter. One that another server unloads before this returns is not listed here either."""
        added = await super().add_lora_async(lora_request)
        if lora_request.lora_int_id not in {adapter.lora_int_id for adapter in self.shared_adapters().values()}:
            # Its caller lists it first.
            asyncio.get_running_loop().call_soon(self.server_state.forget, (lora_request.lora_int_id,))
        return added

    async def get_status(self) -> dict[str, Any]:
        """Status of every replica, in the shape of vLLM's fault-tolerance report."""
        engines = [
            {
                "id": engine_index(member.stage_id, member.replica_id),
                "status": "dead" if member.client is None else "healthy",
            }
            for pool in self.orchestrator.stage_pools
            for member in pool.members
            if not member.other_generation
        ]
        return {"schema_version": 1, "total_engines": len(engines), "engines": engines}

    async def prepare_elastic_ep(self, new_data_parallel_size: int) -> None:
        raise NotImplementedError(_NO_ELASTIC_EP)

    async def commit_elastic_ep(self) -> None:
        raise NotImplementedError(_NO_ELASTIC_EP)

    async def abort_external_elastic_ep(self, error: str) -> None:
        raise NotImplementedError(_NO_ELASTIC_EP)

    async def get_external_elastic_ep_status(self) -> None:
        """None means that engines are not scaled from outside."""

    async def handle_fault(self, ft_request: Any) -> Any:
        raise NotImplementedError("vLLM's fault tolerance does not apply: the fleet restarts lost replicas itself.")

    def dp_engines_running(self) -> bool:
        """Whether any request is unfinished, including those still in the queue."""
        # Check in the order in which requests move, so that none is missed.
        return bool(self._front_end.queued or self.orchestrator.request_states)

    def get_kv_event_sources(self) -> dict[int, Any]:
        return dict(self._events.kv_event_sources)
