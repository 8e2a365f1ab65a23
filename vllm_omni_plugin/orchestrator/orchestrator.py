"""The orchestrator: takes requests from AsyncLLM, gives each to a replica, brings the outputs back."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from vllm_omni_plugin.coordinator import ReplicaKey, ReplicaStatus
from vllm_omni_plugin.errors import OmniError, ReplicaError, WireError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.bad_outputs import BadOutputs
from vllm_omni_plugin.orchestrator.conductor import Conductor
from vllm_omni_plugin.orchestrator.dispatcher import Dispatcher
from vllm_omni_plugin.orchestrator.engine_index import engine_index
from vllm_omni_plugin.orchestrator.fan_out import FanOut
from vllm_omni_plugin.orchestrator.handover import HandoverClosedError, HandoverQueue
from vllm_omni_plugin.orchestrator.membership import RemoteKeeper, ReplicaKeeper, change_membership, explain
from vllm_omni_plugin.orchestrator.messages import (
    AbortRequests,
    CallReplicas,
    Explain,
    FrontMessage,
    ManageReplica,
    Membership,
    OutputUnusable,
    PeerCalled,
    PeerMessage,
    PeersLost,
    PeerWork,
    ReplicaJoined,
    ReplicaLeft,
    RpcMessage,
    SeatTaken,
    SubmitRequest,
    WorkWanted,
)
from vllm_omni_plugin.orchestrator.metrics import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.move_line import MoveLine
from vllm_omni_plugin.orchestrator.output_gate import OutputGate
from vllm_omni_plugin.orchestrator.peer_calls import PeerCalls
from vllm_omni_plugin.orchestrator.preparation import Preparation
from vllm_omni_plugin.orchestrator.request_api import RequestApi
from vllm_omni_plugin.orchestrator.request_state import OrchestratorRequestState
from vllm_omni_plugin.orchestrator.requests import Requests
from vllm_omni_plugin.orchestrator.single_stage import SingleStage
from vllm_omni_plugin.orchestrator.stage_api import StageApi
from vllm_omni_plugin.orchestrator.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.orchestrator.work_exchange import WorkExchange
from vllm_omni_plugin.pipeline import Modality, Pipeline
from vllm_omni_plugin.replicas.stage_client import StageClient

logger = init_logger(__name__)

MAX_QUEUED_REQUESTS = 4096
"""Requests handed over and not taken yet before AsyncLLM waits."""
MAX_QUEUED_OUTPUTS = 4096
"""Output messages AsyncLLM has not taken yet before the replicas' sockets are left unread."""


class Orchestrator:
    """Owns the requests and the pools. Everything but the queues belongs to the loop that runs `run`.

    Args:
        stage_pools: one pool per stage, by stage id.
        api: see `RequestApi`; with a pipeline, a `StageApi` for each stage.
        migration_limit: moves a request may make, in each stage.
        clock: monotonic seconds.
        replica_wait: seconds that a request waits while no replica serves.
        pipeline: the stages; None: there is one, which answers everything.
        prompt_text: the text of a client's request, for the transforms of a pipeline.

    Attributes:
        request_async_queue: `SubmitRequest`, `AbortRequests` and `OutputUnusable`, in order.
        output_async_queue: vLLM's `EngineCoreOutputs`, `RequestFailed`, `ReplicaJoined` and `ReplicaLeft`.
        rpc_async_queue: `CallReplicas`, changes of membership, `ManageReplica` among them, `Explain`, and what other
            heads say.
        local_replicas: keeps the replicas of this node; None without any.
        remote_replicas: keeps those of other processes; None in a head that nobody can join.
        exchange: tells other heads of this one's work and hears of theirs; None in a head that nobody can join.
        peer_calls: tells other heads what administrators tell this one, and heeds what they are told; None likewise.
        drained: replicas that an operator drained, whether they are here or not.
        on_serving: called on the loop after every step that lets a replica take requests.
        stage_pools: the pools; their `members` and `serving` may be read from any thread.
        needed_pools: those that must serve for a plain request to be answered.
        async_chunk: whether a stage may start on parts of its input.
    """

    def __init__(
        self,
        stage_pools: list[StagePool],
        api: RequestApi | Sequence[StageApi],
        migration_limit: int,
        clock: Callable[[], float],
        replica_wait: float = 60.0,
        pipeline: Pipeline | None = None,
        prompt_text: Callable[[Any], str] = lambda request: "",
    ) -> None:
        self.stage_pools = stage_pools
        self.async_chunk = pipeline is not None and any(stage.async_chunk for stage in pipeline.stages)
        self.request_async_queue: HandoverQueue[FrontMessage] = HandoverQueue(MAX_QUEUED_REQUESTS)
        self.output_async_queue: HandoverQueue[Any] = HandoverQueue(MAX_QUEUED_OUTPUTS)
        self.rpc_async_queue: HandoverQueue[RpcMessage] = HandoverQueue(MAX_QUEUED_REQUESTS)
        self.metrics = OrchestratorMetrics()
        self.fan_out = FanOut(stage_pools, self.distrust)
        self.local_replicas: ReplicaKeeper | None = None
        self.remote_replicas: RemoteKeeper | None = None
        self.exchange: WorkExchange | None = None
        self.peer_calls: PeerCalls | None = None
        self.drained: set[ReplicaKey] = set()
        self.on_serving: Callable[[], None] = lambda: None
        self._clock = clock
        self._gate = OutputGate(self.output_async_queue, stage_pools)
        self._moves = MoveLine(clock, self.metrics)
        self._bad_outputs = BadOutputs(stage_pools, clock, self.distrust)
        self._limits = _Limits(migration_limit, replica_wait)
        self.needed_pools = stage_pools
        if pipeline is None:
            self._apis: Sequence[RequestApi] = [cast(RequestApi, api)]
            self._requests: Requests = self._single_stage()
        else:
            self._apis = cast(Sequence[StageApi], api)
            self._requests = self._conductor(pipeline, cast(Sequence[StageApi], api), prompt_text)
        for pool, dispatcher in zip(stage_pools, self._dispatchers, strict=True):
            pool.on_serving = partial(self._replica_began_to_serve, dispatcher)

    @property
    def request_states(self) -> Mapping[str, OrchestratorRequestState]:
        """Unfinished requests by the client's id."""
        return self._requests.states

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return len(self.stage_pools)

    @property
    def can_serve(self) -> bool:
        """Whether every stage that requests need has a replica that takes them. Safe to read from any thread."""
        return all(pool.serving for pool in self.needed_pools)

    async def until_all_finished(self) -> None:
        """Return once no request is unfinished, in any stage, nor handed over and not taken yet."""
        while self.request_states or len(self.request_async_queue):
            await self._requests.states.until_none()
            # What has been handed over is taken in the loop's next turns.
            await asyncio.sleep(0)

    async def run(self) -> None:
        """Serve the queues until they are closed. Sleeps while nothing comes."""
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._serve_requests(), name="omni-requests")
                tasks.create_task(self.fan_out.serve(self.rpc_async_queue, self._heed), name="omni-calls")
        finally:
            if self.exchange is not None:
                self.exchange.close()
            if self.peer_calls is not None:
                await self.peer_calls.close()
            self._gate.close()
            self._moves.close()
            self._requests.close()
            for dispatcher in self._dispatchers:
                dispatcher.close()

    def close_queues(self) -> None:
        """End `run` and release everybody who waits on a queue. Idempotent, from any thread."""
        self.request_async_queue.close()
        for message in self.rpc_async_queue.close():
            if isinstance(message, CallReplicas | ManageReplica | Explain):
                message.reply.cancel()
        self.output_async_queue.close()

    def outputs_received(self, member: PoolMember, outputs: Any) -> None:
        """Outputs came from a replica: release what finished, restore the client's ids, hand them over."""
        stage_id = member.stage_id
        dispatcher, take = self._dispatchers[stage_id], self._requests.take
        kept = [
            answer
            for output in outputs.outputs
            if (run := dispatcher.accept(member, output)) is not None
            and (answer := take(stage_id, run, output)) is not None
        ]
        self.stage_pools[stage_id].settle(member, self._apis[stage_id].load_report(outputs))
        outputs.outputs = kept
        outputs.engine_index = engine_index(stage_id, member.replica_id)
        if kept:
            self._gate.put(outputs)
        elif outputs.scheduler_stats is not None:
            self._gate.put_later(outputs)

    async def admit(self, member: PoolMember, client: StageClient, ready_response: bytes) -> None:
        """See that a replica that attaches can do what its stage is for, and tell it what the others were told.

        The caller must let the replica serve without awaiting anything in between.

        Args:
            member: the replica.
            client: speaks to its engine.
            ready_response: what its engine said of itself when it was ready. AsyncLLM's side relies on it.

        Raises:
            ReplicaError: it cannot, it cannot be brought up to date, or what its engine said cannot be read.
        """
        api = self._apis[member.stage_id]
        try:
            api.cache_size(ready_response)
        except WireError as error:
            raise ReplicaError(f"what its engine said when it was ready cannot be used: {error}") from error
        task = api.pooling_task
        if task is not None and task not in (tasks := await client.call("get_supported_tasks")):
            known = ", ".join(tasks)
            raise ReplicaError(
                f"its model cannot {task!r}: its stage needs 'sampling: {{task: ...}}' with one of {known}"
            )
        await self.fan_out.bring_up_to_date(member, client)

    def replica_serves(
        self, member: PoolMember, client: StageClient, input_addr: str, output_addr: str, ready_response: bytes
    ) -> None:
        """A replica takes requests from now on, over this client, unless it is held back.

        Args:
            member: the replica.
            client: speaks to its engine.
            input_addr: where its requests go.
            output_addr: where its outputs come from.
            ready_response: what its engine said of itself when it was ready.
        """
        member.changed_at = self._clock()
        cache = self._apis[member.stage_id].cache_size(ready_response)
        self.stage_pools[member.stage_id].serve(member, client, input_addr, output_addr, cache)
        self._gate.attached(client)

    def replica_lost(self, member: PoolMember, reason: str, status: ReplicaStatus = ReplicaStatus.DOWN) -> None:
        """A replica is gone: its requests move or fail, each exactly once."""
        pool = self.stage_pools[member.stage_id]
        engine_failed = member.client is not None and member.client.engine_failed
        member.changed_at = self._clock()
        orphans = pool.lose(member, status)
        logger.error(
            "Replica %d of stage %d is lost (%s) with %d requests in flight.",
            member.replica_id,
            pool.stage_id,
            reason,
            len(orphans),
        )
        self._dispatchers[member.stage_id].move(orphans, member, reason, engine_failed)
        index = engine_index(member.stage_id, member.replica_id)
        self._gate.put(self._apis[member.stage_id].idle_report(index))

    def replica_joined(self, member: PoolMember, ready_response: bytes) -> None:
        """A replica that was not there at the start is about to serve: tell AsyncLLM's side."""
        self._gate.put(ReplicaJoined(member.stage_id, member.replica_id, ready_response))

    def replica_left(self, member: PoolMember) -> None:
        """A lost replica does not come back: forget it, and tell AsyncLLM's side."""
        self.stage_pools[member.stage_id].remove(member)
        self._gate.put(ReplicaLeft(member.stage_id, member.replica_id))

    def tell_front(self, item: Any) -> None:
        """Hand something to AsyncLLM's side, in order with what replicas say."""
        self._gate.put(item)

    def distrust(self, member: PoolMember, reason: str) -> None:
        """Take out a replica that does what others do not, so that it starts afresh."""
        client = member.client
        if client is not None:
            self.replica_lost(member, reason, ReplicaStatus.ERROR)
            client.mark_dead(reason)

    def _single_stage(self) -> Requests:
        requests = SingleStage(self._apis[0], self._gate.put)
        requests.dispatcher = self._dispatcher(self.stage_pools[0], requests, self._limits)
        self._dispatchers = [requests.dispatcher]
        return requests

    def _conductor(self, pipeline: Pipeline, apis: Sequence[StageApi], prompt_text: Callable[[Any], str]) -> Requests:
        preparation = Preparation(pipeline, apis, prompt_text)
        requests = Conductor(pipeline, apis, preparation, self._gate.put, self.metrics, self._clock)
        self.fan_out.standstill = requests.standstill
        prefills = {stage.id for stage in pipeline.stages if stage.output is Modality.KV_CACHE}
        # A prefill that cannot be done at once is left to the stage behind it.
        requests.dispatchers = self._dispatchers = [
            self._dispatcher(pool, requests, _Limits(0, 0.0) if pool.stage_id in prefills else self._limits)
            for pool in self.stage_pools
        ]
        needed = {stage.id for stage in pipeline.needed_for(pipeline.default_modalities)} - prefills
        self.needed_pools = [pool for pool in self.stage_pools if pool.stage_id in needed]
        return requests

    def _dispatcher(self, pool: StagePool, requests: Requests, limits: "_Limits") -> Dispatcher:
        return Dispatcher(
            pool,
            self._apis[pool.stage_id],
            limits.migration_limit,
            limits.replica_wait,
            self._clock,
            self.metrics,
            self._moves,
            requests,
        )

    def _replica_began_to_serve(self, dispatcher: Dispatcher) -> None:
        dispatcher.replica_serves()
        self.on_serving()

    def _heed(self, message: Membership | Explain | PeerMessage) -> None:
        try:
            if isinstance(message, Explain):
                explain(message, self.stage_pools)
            elif isinstance(message, PeerMessage):
                self._heed_peer(message)
            else:
                change_membership(
                    message, self.stage_pools, self.local_replicas, self.remote_replicas, self.drained, self.peer_calls
                )
        except Exception as error:
            logger.exception("A message could not be dealt with: %r", message)
            if isinstance(message, Explain | ManageReplica) and not message.reply.done():
                message.reply.set_exception(error)

    def _heed_peer(self, message: PeerMessage) -> None:
        assert self.exchange is not None
        assert self.peer_calls is not None
        match message:
            case PeerWork():
                self.exchange.peer_work(message)
            case PeersLost():
                self.exchange.peers_lost(message)
                self.peer_calls.peers_lost(message.head_ids)
            case WorkWanted():
                self.exchange.work_wanted()
            case SeatTaken():
                self.peer_calls.synchronise()
            case PeerCalled():
                self.peer_calls.called(message.call)

    async def _serve_requests(self) -> None:
        while True:
            try:
                batch = await self.request_async_queue.get_batch()
            except HandoverClosedError:
                return
            for message in batch:
                try:
                    self._take(message)
                except Exception as error:
                    self._fail_alone(message, error)

    def _take(self, message: FrontMessage) -> None:
        match message:
            case SubmitRequest():
                self._requests.submit(message)
            case AbortRequests():
                self._requests.abort(message.request_ids, message.whole)
            case OutputUnusable():
                self._bad_outputs.heed(message)

    def _fail_alone(self, message: FrontMessage, error: Exception) -> None:
        """What is wrong with one message, or with our handling of it, ends that request and nothing else."""
        if isinstance(message, SubmitRequest):
            logger.error("Request %s cannot be served.", message.request.request_id, exc_info=error)
            try:
                self._requests.fail(message, OmniError(f"The request failed: {error!r}"))
            except Exception:
                logger.exception("Nor could its client be told of that.")
        else:
            logger.error("%r could not be dealt with.", message, exc_info=error)


class _Limits(NamedTuple):
    migration_limit: int
    replica_wait: float
