"""An orchestrator of one stage over links in memory, and the view of its client."""

import random
from typing import Any

import msgspec

from tests.fakes.engine_api import FakeEngineApi, FakeRequest
from tests.fakes.links import FakeLink
from tests.fakes.played_fleet import PlayedFleet
from vllm_omni_plugin.admission import AdmissionConfig, RequestTerms
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer, LoadBalancer
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.orchestrator import Orchestrator, PoolMember, StagePool
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadRules
from vllm_omni_plugin.orchestrator.pool.stage_pool import PLAIN, PoolTraits
from vllm_omni_plugin.orchestrator.pool.work_exchange import WorkExchange
from vllm_omni_plugin.orchestrator.requests.load_ledger import UNKNOWN_SIZE
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    ChosenReplicas,
    ReplicaJoined,
    ReplicaLeft,
    RequestFailed,
    SubmitRequest,
)
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize


class FakeFleet(PlayedFleet):
    """One stage of replicas that the test plays. Use it as an asynchronous context manager.

    Args:
        size: of each engine; the ready response has it.

    Attributes:
        now: time of the orchestrator's clock.
        ready_response: ready response of the engines of replicas that join.
        events: outputs of the client, as (request id, finish reason, error, or None for an unfinished output).
        told_first: requests of which the client has received the first output, in order.
        changes: replicas that joined or left.
        statistics: statistics of the client, as (replica id, running requests).
    """

    def __init__(
        self,
        replicas: int = 2,
        balancer: LoadBalancer | None = None,
        migration_limit: int = 3,
        replica_wait: float = 0.0,
        exchange: WorkExchange | None = None,
        traits: PoolTraits = PLAIN,
        plan: AdmissionConfig | None = None,
        size: EngineSize = UNKNOWN_SIZE,
        stall_timeout: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.pool = StagePool(
            0,
            balancer or LeastQueueLengthBalancer(random.Random(0)),
            clock=lambda: self.now,
            traits=traits._replace(exchange=exchange),
        )
        apis = [FakeEngineApi()]
        if plan is None and traits.waits_for_room:
            plan = AdmissionConfig()
        self.exchange = exchange
        self.orchestrator = Orchestrator(
            [self.pool],
            apis,
            HeadRules(migration_limit, replica_wait, stall_timeout, plan),
            lambda: self.now,
        )
        self.ready_response = msgspec.json.encode(size)
        self.links: dict[int, FakeLink] = {}
        self.events: list[tuple[str, Any]] = []
        self.tokens: dict[str, list[int]] = {}
        self.told_first: list[str] = []
        self.changes: list[ReplicaJoined | ReplicaLeft] = []
        self.statistics: list[tuple[int, int]] = []
        for replica_id in range(replicas):
            self.join(self.pool.add(replica_id))

    def join(self, member: PoolMember, broken: bool = False) -> FakeLink:
        """Put a replica into service over a new link."""
        link = self.links[member.replica_id] = FakeLink(f"replica-{member.replica_id}")
        link.broken = broken
        self.serve(member, link, FakeEngineApi(), self.ready_response)
        return link

    def lose(self, replica_id: int) -> None:
        self.links[replica_id].say_dead()

    def kill(self, replica_id: int) -> None:
        client = self.pool.member(replica_id).client
        assert client is not None
        client.mark_dead("its engine process exited: it was ended by SIGKILL")

    async def submit(
        self,
        request_id: str,
        chosen_replicas: ChosenReplicas | None = None,
        terms: RequestTerms | None = None,
        **fields: Any,
    ) -> None:
        """Submit a request; returns when the orchestrator has handled it."""
        await self.hand_over(SubmitRequest(FakeRequest(request_id, **fields), self.now, chosen_replicas, terms=terms))

    async def read(self) -> list[tuple[str, Any]]:
        """Handle all outputs in the queue and return the new events."""
        first = len(self.events)
        if len(self.orchestrator.front_end.output_async_queue):
            for item in await self.orchestrator.front_end.output_async_queue.get_batch():
                self._note(item)
        return self.events[first:]

    async def the_error(self, request_id: str) -> Exception:
        """The error of a request, which must be the only new event."""
        [(name, error)] = await self.read()
        assert name == request_id
        assert isinstance(error, Exception)
        return error

    def attempt(self, request_id: str) -> tuple[FakeLink, str]:
        run = self.orchestrator.request_states[request_id].runs[0]
        assert run.replica_id is not None
        return self.links[run.replica_id], run.engine_request_id

    def home(self, request_id: str) -> Any:
        """The id of the replica that has a request; None: no replica has it now."""
        return self.orchestrator.request_states[request_id].runs[0].replica_id

    def say(self, request_id: str, *tokens: int, **fields: Any) -> None:
        """Send an output from the engine that runs a request; see `FakeLink.output`."""
        link, attempt = self.attempt(request_id)
        link.output(attempt, *tokens, **fields)

    @property
    def statuses(self) -> list[ReplicaStatus]:
        return [member.status for member in self.pool.members]

    @property
    def in_flight(self) -> list[int]:
        return [member.queue_length for member in self.pool.members]

    def _note(self, item: Any) -> None:
        if isinstance(item, ReplicaJoined | ReplicaLeft):
            self.changes.append(item)
            return
        if isinstance(item, RequestFailed):
            self.events.append((item.request_id, item.error))
            return
        for output in item.outputs:
            self.events.append((output.request_id, output.finish_reason))
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
            if output.first:
                self.told_first.append(output.request_id)
        if item.scheduler_stats is not None:
            self.statistics.append((item.engine_index, item.scheduler_stats))
