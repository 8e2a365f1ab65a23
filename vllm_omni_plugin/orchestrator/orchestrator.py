"""The orchestrator: takes requests from AsyncLLM, sends each to a replica, and returns the outputs."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_omni_plugin.admission import NO_QUEUE
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.errors import QueryOfDeathError, ReplicaError, WireError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.dispatch.admission_gate import AdmissionGate
from vllm_omni_plugin.orchestrator.dispatch.dispatcher import Dispatcher
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadContext, HeadRules, StageRules
from vllm_omni_plugin.orchestrator.dispatch.move_budget import MoveBudget
from vllm_omni_plugin.orchestrator.dispatch.stall_watch import StallWatch
from vllm_omni_plugin.orchestrator.event_log import EventKind, EventLog
from vllm_omni_plugin.orchestrator.front_end import FrontEnd, QueuedFrontEnd
from vllm_omni_plugin.orchestrator.multi_stage.input_builder import StageInputBuilder
from vllm_omni_plugin.orchestrator.multi_stage.pipeline_requests import PipelineRequests
from vllm_omni_plugin.orchestrator.pool.pool_member import (
    CORDON_REASONS,
    STALL_CORDON,
    WEIGHTS_CORDON,
    PoolMember,
    stage_and_replica,
)
from vllm_omni_plugin.orchestrator.pool.stage_calls import StageCalls
from vllm_omni_plugin.orchestrator.pool.stage_pool import WEIGHTS_REMEDY, StagePool
from vllm_omni_plugin.orchestrator.requests import orchestrator_messages as messages
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.requests.load_ledger import Work
from vllm_omni_plugin.orchestrator.requests.request_owner import OrchestratorRequestState, RequestOwner
from vllm_omni_plugin.orchestrator.requests.stage_run import Loss, RunEnded
from vllm_omni_plugin.orchestrator.requests.thread_queue import ThreadQueue
from vllm_omni_plugin.orchestrator.serving_signal import ServingSignal
from vllm_omni_plugin.orchestrator.single_stage import SingleStageRequests
from vllm_omni_plugin.pipeline import Modality
from vllm_omni_plugin.replicas.links.engine_client import EngineClient

if TYPE_CHECKING:
    # Imports vLLM; the modules of this package must not.
    from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi

logger = init_logger(__name__)
_BAD_OUTPUTS_S = 60.0


class Orchestrator:
    """Owns the requests and the pools. Everything but the queues belongs to the loop that runs `run`.

    Args:
        stage_pools: by stage id, as are `apis`.
        clock: monotonic seconds.
        input_builder: of the pipeline whose stages have these pools; None: one stage answers all requests.
        front_end: None: a `QueuedFrontEnd`.

    Attributes:
        front_end: where requests come from and outputs go to.
        rpc_async_queue: all other messages (`RpcMessage`); `FleetControl` handles them.
        request_states: unfinished requests by the client's id.
        stage_pools: their `members` and `serving` may be read from any thread.
        stage_calls: operator calls of each stage, by stage id.
        admission: the rules of admission, see `AdmissionGate`; None without admission control.
        entry_pool: of the stage where requests are admitted, unless they skip it.
        needed_pools: the pools that a plain request needs.
        async_chunk: whether any stage may start on parts of its input.
    """

    def __init__(
        self,
        stage_pools: list[StagePool],
        apis: "Sequence[EngineApi]",
        rules: HeadRules,
        clock: Callable[[], float],
        *,
        input_builder: StageInputBuilder | None = None,
        front_end: FrontEnd | None = None,
    ) -> None:
        self.stage_pools = self.needed_pools = stage_pools
        self.async_chunk = False
        self.front_end = front_end or QueuedFrontEnd()
        self.rpc_async_queue: ThreadQueue[messages.RpcMessage] = ThreadQueue()
        self.metrics = OrchestratorMetrics()
        self.events = EventLog()
        self.serving_signal = ServingSignal()
        self._apis = apis
        self._clock = clock
        self._put = self.front_end.give
        # The loop's time beside its handle: uvloop's handle for a time that has passed has no `when`.
        self._timer: tuple[float, asyncio.Handle] | None = None
        self._closed = False
        prefill_stages, downstream_stages = set[int](), set[int]()
        self.entry_pool = stage_pools[0]
        if input_builder is not None:
            pipeline = input_builder.pipeline
            self.async_chunk = any(stage.async_chunk for stage in pipeline.stages)
            prefill_stages = {stage.id for stage in pipeline.stages if stage.output is Modality.KV_CACHE}
            # A stage whose only input is a prefill may also get requests directly from the client.
            downstream_stages = {
                stage.id for stage in pipeline.stages if {up.id for up in pipeline.upstream(stage)} - prefill_stages
            }
            needed = {stage.id for stage in pipeline.needed_for(pipeline.default_modalities)} - prefill_stages
            self.needed_pools = [pool for pool in stage_pools if pool.stage_id in needed]
            self.entry_pool = stage_pools[pipeline.entry.id]
        gate = None
        if rules.admission is not None:
            gate = AdmissionGate(self.entry_pool, rules.admission, self.metrics, clock)
        self.admission = None if gate is None else gate.admission
        self.stage_calls = tuple(
            StageCalls(pool, self.distrust, self._cordon_for_weights, self.uncordon) for pool in stage_pools
        )
        head = HeadContext(clock, self.metrics, self._wake_at, MoveBudget(clock), gate)
        self._dispatchers, self._stalls = list[Dispatcher](), list[StallWatch]()
        for pool, api, calls in zip(stage_pools, apis, self.stage_calls, strict=True):
            pool.on_idle = lambda index: self.front_end.give_later(apis[0].idle_report(index))
            stalls = StallWatch(api, rules.stall_timeout, calls.is_halted, self._wake_at, clock)
            self._stalls.append(stalls)
            # A prefill that cannot be assigned at once is skipped: the decode stage computes the prompt.
            limit, wait = (0, 0.0) if pool.stage_id in prefill_stages else (rules.migration_limit, rules.replica_wait)
            stage_rules = StageRules(limit, wait, has_upstream=pool.stage_id in downstream_stages)
            self._dispatchers.append(Dispatcher(pool=pool, api=api, head=head, rules=stage_rules, stalls=stalls))
        self._requests: RequestOwner[Any]
        if input_builder is None:
            self._requests = SingleStageRequests(apis[0], self._dispatchers[0], gate, self._put)
        else:
            requests = PipelineRequests(
                input_builder, self._dispatchers, gate, self._put, metrics=self.metrics, clock=clock
            )
            for stage_id in prefill_stages:
                stage_pools[stage_id].on_caches_gone = partial(requests.take_back_caches, stage_id)
                finisher = self._dispatchers[stage_id].finisher
                finisher.is_optional, finisher.on_late_end = True, partial(requests.free_cache, stage_id)
            self._requests = requests
        self.request_states: Mapping[str, OrchestratorRequestState] = self._requests.states

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, 1 without one."""
        return len(self.stage_pools)

    @property
    def can_serve(self) -> bool:
        """Whether every needed stage has a replica that takes requests. Safe to read from any thread."""
        return all(pool.serving for pool in self.needed_pools)

    @property
    def has_replicas(self) -> bool:
        """Whether every needed stage has a replica, though it may be cordoned. Safe to read from any thread."""
        return all(any(member.client is not None for member in pool.members) for pool in self.needed_pools)

    async def wait_until_idle(self) -> bool:
        """Return once no request is unfinished or queued. False: `run` has ended and has dropped requests."""
        while not self._closed and (self.request_states or self.front_end.queued):
            await self._requests.wait_until_empty()
            # Queued requests are taken in the loop's next turns.
            await asyncio.sleep(0)
        return not self._closed

    async def run(self) -> None:
        """Serve requests until `close_queues`."""
        try:
            await self.front_end.serve(partial(self._requests.handle, on_unusable=self._output_unusable))
        finally:
            self._closed = True
            self.front_end.stop_waiting()
            self._requests.close()
            if self._timer is not None:
                self._timer[1].cancel()

    def close_queues(self) -> None:
        """End `run` and wake everyone who waits on a queue. Idempotent, from any thread."""
        for message in self.rpc_async_queue.close():
            if isinstance(message, messages.OperatorMessage):
                message.reply.cancel()
        self.front_end.close()

    def outputs_received(self, member: PoolMember, outputs: Any) -> None:
        """Release the finished requests among a replica's outputs, restore the client's ids, send them to AsyncLLM."""
        stage_id, requests = member.stage_id, self._requests
        accepted, ended = self._dispatchers[stage_id].finisher.accept(member, outputs.outputs)
        if ended:
            self._runs_ended(stage_id, ended)
        outputs.outputs = requests.accept_outputs(stage_id, accepted) if accepted else []
        report = self._apis[stage_id].load_report(outputs, clear=not member.in_flight)
        outputs.engine_index = member.engine_index
        if outputs.outputs:
            self._put(outputs)
        elif report is not None:
            self.front_end.give_later(outputs)
        # Behind the outputs, for which a client waits.
        if report is not None:
            self.stage_pools[stage_id].report(member, report)
        # Without admission control nothing waits.
        if self.admission is not None and (ended := self._dispatchers[stage_id].send_waiting(member)):
            self._runs_ended(stage_id, ended)

    async def prepare_replica(
        self,
        member: PoolMember,
        client: EngineClient,
        ready_response: bytes,
        sleeps: bool = False,
    ) -> None:
        """Check that a replica can do its stage's task, and bring it to the state that operator calls have left.

        A replica that lacks weights which were updated at run time is cordoned until the next complete update.
        A replica that has stalled must compute a request first.

        The caller must call `replica_serves` in the same step of the loop, without an await in between.

        Args:
            ready_response: its engine's, as vLLM encoded it.
            sleeps: whether its engine is paused or asleep.

        Raises:
            ReplicaError: the replica lacks the task or the length, cannot be brought up to date or still computes
                nothing, or its response is invalid.
        """
        if STALL_CORDON in member.cordons:
            await self._try_stalled(member, client, sleeps)
        api = self._apis[member.stage_id]
        try:
            size = api.engine_size(ready_response)
        except WireError as error:
            raise ReplicaError(f"its engine's ready response is invalid: {error}") from error
        task = api.pooling_task
        if task is not None and task not in (tasks := await client.call("get_supported_tasks")):
            known = ", ".join(tasks)
            raise ReplicaError(
                f"its model cannot {task!r}: its stage needs 'sampling: {{task: ...}}' with one of {known}"
            )
        stage = self.stage_calls[member.stage_id]
        self._cordon_for_weights(member, not await stage.bring_up_to_date(member, client, sleeps))
        # Last: another replica may have begun to serve meanwhile.
        self.stage_pools[member.stage_id].check_length(member, size)

    def replica_serves(
        self, member: PoolMember, client: EngineClient, input_addr: str, output_addr: str, ready_response: bytes
    ) -> None:
        """A replica takes requests from now on, over this client, unless it is cordoned."""
        member.changed_at = self._clock()
        size = self._apis[member.stage_id].engine_size(ready_response)
        if self.stage_pools[member.stage_id].serve(member, client, input_addr, output_addr, size):
            self._began_to_serve(member)
        self.serving_signal.notify()

    def cordon(self, member: PoolMember, reason: str) -> None:
        """Send a replica no new requests; those in flight go on. Idempotent for each reason."""
        if reason not in member.cordons:
            self.stage_pools[member.stage_id].cordon(member, reason)
            self._runs_ended(member.stage_id, self._dispatchers[member.stage_id].stop_waiting_for(member))
            self.events.record(EventKind.DRAIN, CORDON_REASONS[reason][0], member)

    def uncordon(self, member: PoolMember, reason: str) -> None:
        """Remove a reason, if it applies; the replica takes requests again unless it is cordoned for another one."""
        if reason not in member.cordons:
            return
        self.events.record(EventKind.RESUME, CORDON_REASONS[reason][1], member)
        if self.stage_pools[member.stage_id].uncordon(member, reason):
            self._began_to_serve(member)
            self.serving_signal.notify()

    def replica_lost(
        self,
        member: PoolMember,
        reason: str,
        status: ReplicaStatus = ReplicaStatus.DOWN,
        level: int | None = None,
    ) -> None:
        """A replica is gone: its requests move or fail, each exactly once. `level` is that of the log line."""
        pool = self.stage_pools[member.stage_id]
        engine_failed = member.client is not None and member.client.engine_failed
        member.changed_at = self._clock()
        others, served = pool.others_at(member), member.client is not None
        orphans = pool.lose(member, status)
        # The other orphans were charged to it, but not sent yet.
        sent = [run for run in orphans if run.sent]
        loss = Loss(member, reason, len(sent), others)
        self.events.record(EventKind.LOST, reason, member, requests=len(sent), level=level)
        if served:
            self._report_old_weights(pool)
        ended = self._dispatchers[member.stage_id].move(orphans, member, loss, engine_failed)
        moved = sum(not run.ended for run in sent)
        if moved:
            self.events.record(EventKind.MOVE, reason, member, requests=moved)
        self._runs_ended(member.stage_id, ended)

    def update_other_heads_work(self, member: PoolMember, work: Work | None) -> None:
        """The other heads' work at a replica has changed, see `StagePool.set_others_work`: it may have room now."""
        if work is not None:
            self._stalls[member.stage_id].others_work_changed(member, member.ledger.others_work, work)
        self.stage_pools[member.stage_id].set_others_work(member, work)
        self._runs_ended(member.stage_id, self._dispatchers[member.stage_id].send_waiting(member))

    def replica_joined(self, member: PoolMember, ready_response: bytes) -> None:
        """A replica that came after the start is about to serve: notify AsyncLLM."""
        self._put(messages.ReplicaJoined(member.stage_id, member.replica_id, ready_response))

    def replica_left(self, member: PoolMember) -> None:
        """A lost replica does not come back: remove it, and notify AsyncLLM."""
        self.stage_pools[member.stage_id].remove(member)
        self._put(messages.ReplicaLeft(member.stage_id, member.replica_id))

    def distrust(self, member: PoolMember, reason: str) -> None:
        """Take out a replica whose state or outputs are wrong; its engine is reset or restarted."""
        client = member.client
        if client is not None:
            self.replica_lost(member, reason, ReplicaStatus.ERROR)
            client.mark_dead(reason)

    def _output_unusable(self, message: messages.OutputUnusable) -> None:
        """Distrust a replica at its second bad output within a minute: the first may be the request's own fault."""
        stage_id, replica_id = stage_and_replica(message.engine_index)
        pool, now = self.stage_pools[stage_id], self._clock()
        member = next((each for each in pool.members if each.replica_id == replica_id), None)
        if member is None or member.client is None:
            # It was lost meanwhile.
            return
        reason = f"its output for request {message.request_id} could not be processed: {message.reason}"
        is_first = now - member.bad_output_at > _BAD_OUTPUTS_S
        member.bad_output_at = now
        # All other ranks of a lockstep group would end with it.
        if is_first or pool.lockstep or all(other is member for other in pool.serving):
            logger.error("Replica %s stays in service (%s).", member.name, reason)
        else:
            self.distrust(member, reason)

    def explain(self, question: messages.Explain) -> messages.Explanation:
        """Where a request would go now, or stand in the queue; see `StagePool.explain`."""
        queue_position = NO_QUEUE
        if self.admission is not None:
            queue_position = self.admission.queue_position(question.terms, question.priority, self._clock())
        return self.stage_pools[question.stage_id].explain(question.task, queue_position)

    def _cordon_for_weights(self, member: PoolMember, waits: bool) -> None:
        """Cordon a replica until it has got a complete weight update, or uncordon it."""
        if not waits:
            self.uncordon(member, WEIGHTS_CORDON)
        elif WEIGHTS_CORDON not in member.cordons:
            self.cordon(member, WEIGHTS_CORDON)
            self._report_old_weights(self.stage_pools[member.stage_id])

    def _report_old_weights(self, pool: StagePool) -> None:
        updated = [each for each in pool.members if each.client is not None and WEIGHTS_CORDON not in each.cordons]
        if not updated and any(WEIGHTS_CORDON in each.cordons for each in pool.members):
            self.events.record(EventKind.OLD_WEIGHTS, f"stage {pool.stage_id} {WEIGHTS_REMEDY}", stage=pool.stage_id)

    def _wake_at(self, time: float) -> None:
        """Schedule `tick` for this time, or earlier."""
        if self._closed:
            return
        loop = asyncio.get_running_loop()
        at = loop.time() + max(0.0, time - self._clock())
        if self._timer is not None:
            due, handle = self._timer
            if due <= at:
                return
            handle.cancel()
        self._timer = at, loop.call_at(at, self.tick)

    def tick(self) -> None:
        """Handle what has become due; its timer calls this."""
        self._timer = None
        for stage_id, dispatcher in enumerate(self._dispatchers):
            self._runs_ended(stage_id, dispatcher.tick())
        for pool, dispatcher, stalls in zip(self.stage_pools, self._dispatchers, self._stalls, strict=True):
            stalled = [each for each in stalls.take_stalled() if not dispatcher.take_back_awaited_caches(each[0])]
            # All first, so that no request moves from one to another.
            for member, reason in stalled:
                member.stalls += 1
                member.request_to_try = stalls.request_to_try(member)
                self.events.record(EventKind.STALL, reason, member, requests=len(member.in_flight))
                pool.cordon(member, STALL_CORDON)
            for member, reason in stalled:
                self.distrust(member, reason)

    async def _try_stalled(self, member: PoolMember, client: EngineClient, sleeps: bool) -> None:
        """Return once the engine has computed a request, if it may; raises `ReplicaError` if it does not."""
        is_halted = sleeps or self.stage_calls[member.stage_id].is_halted()
        if member.request_to_try is not None and not is_halted:
            await client.try_request(member.request_to_try, self._stalls[member.stage_id].timeout)
        member.request_to_try = None
        self.uncordon(member, STALL_CORDON)

    def _began_to_serve(self, member: PoolMember) -> None:
        self._runs_ended(member.stage_id, self._dispatchers[member.stage_id].replica_serves())

    def _runs_ended(self, stage_id: int, ended: Sequence[RunEnded]) -> None:
        for run, _, error in ended:
            # Skip requests whose crashes another request caused: they only waited too long for their two replicas.
            if isinstance(error, QueryOfDeathError) and any(loss.culprit in (None, run) for loss in run.crash_losses):
                crashes = ", ".join(
                    f"replica {loss.replica.name} with {loss.requests - 1} others in flight ({loss.reason})"
                    for loss in run.crash_losses
                )
                reason = f"{crashes} died under request {run.request_id}"
                self.events.record(EventKind.QUERY_OF_DEATH, reason, stage=stage_id, requests=1)
        self._requests.runs_ended(stage_id, ended)
