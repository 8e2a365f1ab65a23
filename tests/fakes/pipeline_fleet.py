"""An orchestrator of several stages over links in memory, and the view of its clients."""

import random
from collections.abc import Container, Iterator, Sequence
from typing import Any

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeRequest
from tests.fakes.played_fleet import PlayedFleet
from tests.fakes.stage_api import FakeStageApi, PlayedLink
from vllm_omni_plugin.admission import AdmissionConfig, RequestTerms
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer
from vllm_omni_plugin.orchestrator import Orchestrator, OrchestratorRequestState, PoolMember, StagePool
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadRules
from vllm_omni_plugin.orchestrator.multi_stage.input_builder import StageInputBuilder
from vllm_omni_plugin.orchestrator.multi_stage.request_state import PipelineRequestState
from vllm_omni_plugin.orchestrator.pool.stage_pool import PLAIN, PoolTraits
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    ChosenReplicas,
    PipelineCall,
    PipelineCallEnded,
    RequestFailed,
    RequestStages,
    StageEvent,
    SubmitRequest,
)
from vllm_omni_plugin.pipeline import Modality, Pipeline, Stage

TRANSFORM = "tests.fakes.transforms:obedient"


def stage(stage_id: int, name: str, output: str, *inputs: str, engine: str = "vllm", **fields: Any) -> Stage:
    """A stage. If it has inputs, its transform does what the request asks for."""
    if engine == "vllm":
        fields.setdefault("model", name)
    if inputs:
        fields.setdefault("transform", TRANSFORM)
    if fields.get("async_chunk") and engine == "vllm":
        fields.setdefault("sampling", {"max_tokens": 4})
    return Stage(stage_id, name, engine, Modality(output), inputs=inputs, **fields)


class FakePipelineFleet(PlayedFleet):
    """Stages of replicas that the test plays. Use it as an asynchronous context manager.

    Args:
        replicas: number of replicas of each stage, or of all.

    Attributes:
        links: the current link of each replica, by stage and replica.
        tokens: tokens of each request that vLLM's server received.
        cached: numbers of cached tokens that it received.
        ends: finish reason or error of each request in vLLM's server, in order.
        events: events of each call.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        replicas: int | Sequence[int] = 1,
        migration_limit: int = 3,
        replica_wait: float = 0.0,
        traits: PoolTraits = PLAIN,
        plan: AdmissionConfig | None = None,
        stall_timeout: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.pipeline = Pipeline(tuple(stages))
        if plan is None and traits.waits_for_room:
            plan = AdmissionConfig()
        self.apis = [FakeStageApi(stage) for stage in self.pipeline.stages]
        self.pools = [
            StagePool(
                stage.id,
                LeastQueueLengthBalancer(random.Random(0)),
                clock=self.clock,
                traits=traits,
            )
            for stage in self.pipeline.stages
        ]
        self.orchestrator = Orchestrator(
            self.pools,
            self.apis,
            HeadRules(migration_limit, replica_wait, stall_timeout, plan),
            self.clock,
            input_builder=StageInputBuilder(self.pipeline, self.apis, lambda request: "the prompt"),
        )
        self.links: dict[tuple[int, int], PlayedLink] = {}
        self.tokens: dict[str, list[int]] = {}
        self.cached: dict[str, list[int]] = {}
        self.ends: list[tuple[str, Any]] = []
        self.events: dict[str, list[StageEvent | PipelineCallEnded]] = {}
        self.traces: list[RequestStages] = []
        counts = [replicas] * len(self.pools) if isinstance(replicas, int) else replicas
        for pool, count in zip(self.pools, counts, strict=True):
            for replica_id in range(count):
                self.join(pool.add(replica_id))

    def clock(self) -> float:
        return self.now

    @property
    def states(self) -> dict[str, OrchestratorRequestState]:
        return dict(self.orchestrator.request_states)

    @property
    def in_flight(self) -> int:
        return sum(member.queue_length for pool in self.pools for member in pool.members)

    def join(self, member: PoolMember) -> PlayedLink:
        key = (member.stage_id, member.replica_id)
        python = not self.pipeline.stages[member.stage_id].is_vllm
        link = self.links[key] = PlayedLink(f"replica-{member.name}", python)
        self.serve(member, link, self.apis[member.stage_id], b"")
        return link

    def lose(self, stage_id: int, replica_id: int) -> None:
        """The replica's engine crashes."""
        self.links[stage_id, replica_id].say_dead()

    def kill(self, stage_id: int, replica_id: int) -> None:
        """The replica's engine is ended from outside."""
        client = self.pools[stage_id].member(replica_id).client
        assert client is not None
        client.mark_dead("its engine process exited: it was ended by SIGKILL")

    async def submit(
        self,
        request_id: str,
        *modalities: str,
        outputs: Sequence[str] = (),
        params: dict[str, Any] | None = None,
        sampling: dict[str, Any] | None = None,
        chosen_replicas: ChosenReplicas | None = None,
        traced: bool = False,
        terms: RequestTerms | None = None,
        settle: bool = True,
        **fields: Any,
    ) -> None:
        """Submit a request, with a `PipelineCall` if modalities are given."""
        call = None
        if modalities:
            events = self.events[request_id] = []
            call = PipelineCall(modalities, events.append, frozenset(outputs), sampling or {}, params or {})
        fields.setdefault("prompt", [1, 2, 3])
        request = FakeRequest(request_id, **fields)
        await self.hand_over(SubmitRequest(request, self.now, chosen_replicas, call, traced, terms))
        if settle:
            await self.settle()

    async def settle(self, blocked: Container[tuple[str, int]] = ()) -> None:
        """Wait until all inputs are prepared, except `blocked` (request, stage) pairs, and read the outputs."""
        await eventually(
            lambda: all(each in blocked for state in self.states.values() for each in _in_preparation(state)),
            "the end of preparations",
        )
        await self.read()

    async def read(self) -> None:
        if len(self.orchestrator.front_end.output_async_queue):
            for item in await self.orchestrator.front_end.output_async_queue.get_batch():
                self._note(item)

    def attempt(self, request_id: str, stage_id: int) -> tuple[PlayedLink, str]:
        """Link and engine-side id of the current attempt of a stage."""
        run = self.states[request_id].runs[stage_id]
        assert run.replica_id is not None
        return self.links[stage_id, run.replica_id], run.engine_request_id

    def tell(self, request_id: str, stage_id: int, *tokens: int, **fields: Any) -> None:
        """Send an output from the engine of a stage; see `PlayedLink.tell`."""
        link, attempt = self.attempt(request_id, stage_id)
        link.tell(attempt, *tokens, **fields)

    async def step(self, request_id: str, stage_id: int, count: int = 1) -> None:
        link, attempt = self.attempt(request_id, stage_id)
        link.step(attempt, count)
        await self.settle()

    async def finish(self, *request_ids: str) -> None:
        """Run the engines until these requests, or all, have ended."""
        while names := [name for name in self.states if name in request_ids or not request_ids]:
            for name, stage_id in list(self.at_work(names)):
                if name in self.states and self.states[name].runs[stage_id].replica_id is not None:
                    link, attempt = self.attempt(name, stage_id)
                    if attempt in link.attempts:
                        link.step(attempt)
            await self.settle()
        await self.read()

    def at_work(self, names: Sequence[str]) -> Iterator[tuple[str, int]]:
        """Requests and stages whose engines have outputs to send."""
        for name in names:
            for stage_id, run in list(self.states[name].runs.items()):
                if run.replica_id is not None and not run.finished:
                    link = self.links[stage_id, run.replica_id]
                    attempt = link.attempts.get(run.engine_request_id)
                    if attempt is not None and attempt.turns:
                        yield name, stage_id

    def received(self, request_id: str) -> dict[str, list[int]]:
        """All tokens that a call has received, by stage; those through vLLM's server under ""."""
        received = {"": list(self.tokens.get(request_id, ()))}
        for event in self.events[request_id]:
            if isinstance(event, StageEvent):
                received.setdefault(event.stage, []).extend(event.output.token_ids)
        return received

    def shown(self, request_id: str, stage: str) -> list[int]:
        """Tokens of a stage that a call has received."""
        return self.received(request_id).get(stage, [])

    def call_ends(self, request_id: str) -> list[Exception | None]:
        """The errors (None: success) with which a call has ended; one entry if all is well."""
        return [event.error for event in self.events[request_id] if isinstance(event, PipelineCallEnded)]

    def _note(self, item: Any) -> None:
        if isinstance(item, RequestFailed):
            self.ends.append((item.request_id, item.error))
            return
        if isinstance(item, RequestStages):
            self.traces.append(item)
            return
        for output in item.outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.cached is not None:
                self.cached.setdefault(output.request_id, []).append(output.cached)
            if output.finish_reason is not None:
                self.ends.append((output.request_id, output.finish_reason))


def _in_preparation(state: OrchestratorRequestState) -> Iterator[tuple[str, int]]:
    assert isinstance(state, PipelineRequestState)
    whole = state.stage_submit_ts.keys() - state.ended.keys() - set(state.runs) - set(state.chunked_inputs)
    for stage_id in (*whole, *(stage_id for stage_id, chunks in state.chunked_inputs.items() if chunks.busy)):
        yield state.request_id, stage_id
