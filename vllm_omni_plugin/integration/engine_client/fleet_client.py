"""The engine-core client that AsyncLLM gets: vLLM's interface in front of the orchestrator."""

import asyncio
import math
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from prometheus_client import REGISTRY
from vllm.v1.engine.exceptions import EngineDeadError

from vllm_omni_plugin.admin.head_drain import HeadDrain
from vllm_omni_plugin.admin.http_admission import current_response
from vllm_omni_plugin.admin.metrics.fleet_metrics import FleetCollector
from vllm_omni_plugin.admin.metrics.multiprocess_metrics import MetricFiles, in_multiprocess_mode
from vllm_omni_plugin.admin.replica_header import new_dispatches
from vllm_omni_plugin.errors import NoReplicaError, OmniError, ReplicaError, StageError
from vllm_omni_plugin.integration.engine_client.fleet_events import FLEET_EVENTS, FleetEventHandler
from vllm_omni_plugin.integration.engine_client.graceful_shutdown import GracefulShutdown
from vllm_omni_plugin.integration.engine_client.pipeline_calls import register_request
from vllm_omni_plugin.integration.engine_client.server_state_sync import ServerStateSync
from vllm_omni_plugin.integration.engine_client.utility_calls import UtilityCallClient
from vllm_omni_plugin.integration.fleet_setup.fleet import Fleet
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.pool.pool_member import engine_index
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    AbortRequests,
    PipelineCall,
    PipelineCallEnded,
    RequestMessage,
    SubmitRequest,
)
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError
from vllm_omni_plugin.vllm_api.requests.request_building import drop_transfers

logger = init_logger(__name__)

_WAITING_NOTICE_S = 10.0
_TURN_EVERY_S = 0.01
_ENGINE_GRACE_S = 5.0
"""Seconds that engines have to end when their requests have: one that takes longer hangs."""


class FleetClient(UtilityCallClient):
    """Answers everything AsyncLLM asks of "the engine" on behalf of all replicas.

    Lives on AsyncLLM's event loop; all work happens on the orchestrator's.

    Args:
        fleet: the started fleet; the client owns it from here on.
        vllm_config: AsyncLLM's configuration, brought in line with what the engines found at their start.
        ready_responses: what the local engines said of themselves, by stage and in the order of their ids.
        clock: monotonic seconds.

    Attributes:
        orchestrator: balances over the replicas.
        stages: that they serve.
        engine_ranks_managed: engine indexes that vLLM's metrics are labelled with from the start: those of the local
            replicas. Those of others are labelled when they join.
        resources: `resources.engine_dead` tells AsyncLLM that nothing will ever be served again. Dead replicas,
            even all of them, are not that: they come back.
        server_state: follows what other heads were told.
        graceful_shutdown: what becomes of requests when the server is told to end.
        head_drain: whether an operator drains this head.
    """

    def __init__(
        self,
        fleet: Fleet,
        vllm_config: Any,
        ready_responses: list[list[bytes]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(fleet.orchestrator, fleet.stages)
        self._fleet = fleet
        self.fleet_calls = fleet.fleet_calls
        self._events = FleetEventHandler(fleet.stages, vllm_config, ready_responses, self.abort_call, self._tell)
        self._received: deque[Any] = deque()
        self._clock = clock
        self._others_due = -math.inf
        # vLLM labels engine 0 in any case.
        self.engine_ranks_managed = [
            engine_index(stage_id, replica_id)
            for stage_id, responses in enumerate(ready_responses)
            for replica_id in range(len(responses))
        ] or [0]
        self.resources = SimpleNamespace(engine_dead=False)
        self.graceful_shutdown = GracefulShutdown()
        self.head_drain = HeadDrain(self.orchestrator.events)
        self.server_state: ServerStateSync = self._events.peer
        self._shutting_down = False
        self._collector = FleetCollector(self.orchestrator)
        REGISTRY.register(self._collector)
        self._metric_files = MetricFiles(self._collector) if in_multiprocess_mode() else None
        # The engines must not outlive this process, also if nobody calls shutdown.
        self._finalizer = weakref.finalize(self, fleet.close)

    def bind(self, output_processor: Any, logger_manager: Any) -> None:
        """Tell the client of AsyncLLM's parts that exist by now: what ends and traces requests, what counts them."""
        self.graceful_shutdown.bind(output_processor)
        self._events.bind(output_processor, logger_manager, [pool.policy for pool in self.orchestrator.stage_pools])

    @property
    def can_serve(self) -> bool:
        """Whether every stage that an ordinary request needs has a replica that takes requests."""
        return self.orchestrator.can_serve

    @property
    def answers(self) -> bool:
        """Whether it is not shut down, and this thread is not the one of AsyncLLM's loop, where answers are made."""
        return bool(self._finalizer.alive) and self.graceful_shutdown.loop_in_other_thread

    async def until_serving(self) -> None:
        """Return once `can_serve` holds."""
        await self.orchestrator.serving_signal.wait()

    def cancel_wait(self) -> None:
        """Wait no longer for requests to finish, if `shutdown` does. Never blocks."""
        self.graceful_shutdown.cancel_wait()
        self._fleet.cancel_wait()

    def shutdown(self, timeout: float | None = None) -> None:
        """Let requests finish for `timeout` seconds, end the local replicas, then what is left. Idempotent; blocks."""
        if self._finalizer.detach() is None:
            return
        left = self.graceful_shutdown.wait_for_requests(self._fleet.wait_for_requests, timeout)
        REGISTRY.unregister(self._collector)
        if self._metric_files is not None:
            self._metric_files.close()
        self._shutting_down = True
        self._fleet.close(left if left is None else min(left, _ENGINE_GRACE_S))
        self.graceful_shutdown.abort_all()
        self.resources.engine_dead = True

    async def get_output_async(self) -> Any:
        """The next `EngineCoreOutputs` of any replica. Requests that fail are failed on the way."""
        queue = self.orchestrator.output_async_queue
        self.graceful_shutdown.outputs_processed()
        if self._received or len(queue):
            await self._let_others_run()
        while True:
            while self._received:
                item = self._received.popleft()
                if not isinstance(item, FLEET_EVENTS):
                    # AsyncLLM has processed all outputs in it before it asks for the next one.
                    self._events.sender = item.engine_index
                    return item
                self._events.handle(item)
            try:
                self._received.extend(await queue.get_batch())
            except QueueClosedError:
                if self._shutting_down:
                    # AsyncLLM ends the task that asks; an error would be logged as a fault of the engine.
                    await asyncio.get_running_loop().create_future()
                self.resources.engine_dead = True
                raise EngineDeadError from None

    async def _let_others_run(self) -> None:
        """Give everything else on AsyncLLM's loop a turn, if it has had none for 10 ms.

        While engines are faster than AsyncLLM there are always outputs, and HTTP would stand still. A turn for every
        message would be dear: what comes for a request between two turns goes to its client as one event.
        """
        if self._clock() >= self._others_due:
            await asyncio.sleep(0)
            self._others_due = self._clock() + _TURN_EVERY_S

    async def add_request_async(self, request: Any) -> None:
        """Hand a request over. Waits only while the orchestrator is far behind."""
        call = None
        if self.stages.pipeline is not None:
            # Only the pipeline says to its stages where they fetch caches from.
            drop_transfers(request)
            call = register_request(request.request_id)
        # A further part of a session is no new request, unless its first one has not even been taken.
        if self.graceful_shutdown.ending and request.request_id not in self.orchestrator.request_states:
            self.graceful_shutdown.refuse(request.request_id, call)
            self.abort_call([request.request_id])
            return
        queue = self.orchestrator.request_async_queue
        dispatches = new_dispatches()
        spans = self._events.spans
        if spans is not None:
            dispatches = spans.expect(request.request_id, dispatches)
        now, answer, terms = self._clock(), current_response(), None
        if answer is not None:
            if answer.refusal is not None:
                self._give_up(request.request_id, call, answer.refusal)
                return
            terms = answer.add_request(request.request_id, now)
            self._events.answers[request.request_id] = answer
        message = SubmitRequest(request, now, dispatches, call, traced=spans is not None, terms=terms)
        try:
            await queue.put(message)
        except QueueClosedError:
            raise EngineDeadError from None
        except asyncio.CancelledError:
            # AsyncLLM has registered it, and aborts only what it has handed over.
            self._give_up(request.request_id, call, StageError("The request was aborted."))
            raise

    def _give_up(self, request_id: str, call: PipelineCall | None, error: OmniError) -> None:
        """End a request without a word, and the call of a pipeline with this error."""
        self._events.forget(request_id)
        if call is not None:
            call.put(PipelineCallEnded(error))

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        """Abort requests wherever they run; of those with a call of a pipeline, what answers through vLLM's server."""
        self.abort_call(request_ids, whole=False)

    def abort_call(self, request_ids: Sequence[str], whole: bool = True) -> None:
        """Abort everything that is done in any stage for these requests, by AsyncLLM's ids. Never blocks."""
        self.graceful_shutdown.outputs_processed()
        if request_ids:
            self._tell(AbortRequests(tuple(request_ids), whole))

    def _tell(self, message: RequestMessage) -> None:
        # Not bounded by the queue's length, since an abort must never wait; there are no more than requests.
        with suppress(QueueClosedError):
            self.orchestrator.request_async_queue.force_put(message)

    async def get_supported_tasks_async(self) -> Any:
        """What the model can do. The server asks once at its start, and a head without engines waits here for one."""
        while True:
            try:
                async with asyncio.timeout(_WAITING_NOTICE_S):
                    await self.until_serving()
            except TimeoutError:
                logger.info("Waiting for a first replica to join; the server answers as soon as there is one.")
                continue
            try:
                # A prefill stage may be empty while decode, of the same model, serves.
                tasks = await super().get_supported_tasks_async()
                return self.stages.supported(tasks)
            except (NoReplicaError, ReplicaError):
                # A first replica that is lost at once is waited for again; one that serves on means what it says.
                if self.can_serve:
                    raise

    async def get_status(self) -> dict[str, Any]:
        """Status of every replica, in the shape of vLLM's fault-tolerance report."""
        engines = [
            {
                "id": engine_index(member.stage_id, member.replica_id),
                "status": "dead" if member.client is None else "healthy",
            }
            for pool in self.orchestrator.stage_pools
            for member in pool.members
        ]
        return {"schema_version": 1, "total_engines": len(engines), "engines": engines}

    async def prepare_elastic_ep(self, new_data_parallel_size: int) -> None:
        raise NotImplementedError("Elastic expert parallelism does not apply to a fleet of --omni-* replicas.")

    async def commit_elastic_ep(self) -> None:
        raise NotImplementedError("Elastic expert parallelism does not apply to a fleet of --omni-* replicas.")

    async def abort_external_elastic_ep(self, error: str) -> None:
        raise NotImplementedError("Elastic expert parallelism does not apply to a fleet of --omni-* replicas.")

    async def get_external_elastic_ep_status(self) -> None:
        """None, as where vLLM's own engines are not scaled from outside."""

    async def handle_fault(self, ft_request: Any) -> Any:
        raise NotImplementedError("vLLM's fault tolerance does not apply: the fleet restarts lost replicas itself.")

    def dp_engines_running(self) -> bool:
        """Whether any request is unfinished, also one that is handed over and not taken yet."""
        # In this order, in which requests go.
        return bool(len(self.orchestrator.request_async_queue) or self.orchestrator.request_states)

    def get_kv_event_sources(self) -> dict[int, Any]:
        return dict(self._events.kv_event_sources)
