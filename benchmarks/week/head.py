"""A head with its real orchestrator in front of engines that are played, and what befalls these."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any

from vllm_omni_plugin.admin.metrics.fleet_metrics import all_totals
from vllm_omni_plugin.admission import AdmissionConfig
from vllm_omni_plugin.balancing import LoadBalancer
from vllm_omni_plugin.orchestrator.fleet_control import FleetControl
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON, DRAIN_CORDON, LATE_CORDON
from vllm_omni_plugin.orchestrator.pool.send_window import SEND_AT_ONCE, SendWindow
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.replicas.client.stage_client import StageClient
from week.played_engine import BLOCK_SIZE, BLOCKS, PLACES, PlayedApi, PlayedEngine

MOVES, WAIT_S = 3, 60.0
"""The defaults of `--omni-migration-limit` and `--omni-replica-wait`."""
_STEP_TOKENS = 64
"""Of prompts in one step of an engine; what an engine with a queue gets ahead follows from it."""
_READY = f"[{BLOCKS}, {BLOCK_SIZE}, {_STEP_TOKENS}, {PLACES}]".encode()


class Head:
    """One stage of replicas that come and go. Made within a running loop; an asynchronous context manager.

    Args:
        policy: of the stage.
        name: the policy's.
        replicas: at the beginning; the fleet comes back to so many.
        rng: draws what happens.
        plan: who may come in, and waits here until a replica can begin it; None: each request is sent at once.

    Attributes:
        happened: what befell replicas how often, by name.
        orchestrator: the head's.
        pool: of the stage.
    """

    def __init__(
        self, policy: LoadBalancer, name: str, replicas: int, rng: random.Random, plan: AdmissionConfig | None = None
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._rng = rng
        self._engines: dict[PoolMember, PlayedEngine] = {}
        self._started = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._befallen: set[PoolMember] = set()
        self.happened: Counter[str] = Counter()
        send_window = SEND_AT_ONCE if plan is None else SendWindow(limited=True, recalls=True)
        self.pool = StagePool(0, policy, name, self._loop.time, send_window=send_window)
        # Those of its methods that only pipelines need are missing.
        apis: list[Any] = [PlayedApi()]
        self.orchestrator = Orchestrator([self.pool], apis, MOVES, self._loop.time, WAIT_S, admission_config=plan)
        for _ in range(replicas):
            self._join(self.pool.add())
        self._faults: dict[str, tuple[int, Callable[[], Coroutine[Any, Any, None]]]] = {
            "an engine crashes and is started again": (4, self._crash),
            "a replica is lost and another one joins": (3, self._replace),
            "a replica ends in order and another one joins": (3, self._end),
            "an operator drains a replica and resumes it": (3, self._drain),
            "heartbeats of a replica are late": (3, self._delay_heartbeats),
            "replicas join for an hour": (2, self._scale),
            "all replicas are lost": (1, self._lose_all),
        }

    async def __aenter__(self) -> "Head":
        self._running = asyncio.create_task(FleetControl(self.orchestrator, FleetCalls(self.orchestrator)).run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.orchestrator.close_queues()
        await self._running

    def befall(self) -> None:
        """Let something begin to happen to replicas."""
        names = list(self._faults)
        (name,) = self._rng.choices(names, [weight for weight, _ in self._faults.values()])
        self.happened[name] += 1
        task = self._loop.create_task(self._faults[name][1]())
        self._tasks.add(task)
        task.add_done_callback(self._done)

    @property
    def refused_twice(self) -> int:
        """See `PlayedEngine`, of the engines that are there."""
        return sum(engine.refused_twice for engine in self._engines.values())

    def left(self) -> Iterator[tuple[str, float]]:
        """What is counted, charged, queued or kept of requests, by where. All of it is 0 when there is none."""
        orchestrator, metrics, pool = self.orchestrator, self.orchestrator.metrics, self.pool
        admission = orchestrator.admission
        for member in pool.members:
            load, ledger = member.ledger.uncached_load(), member.ledger
            yield "in flight", len(member.in_flight)
            yield "charged requests", load.requests
            yield "charged to others", load.others
            yield "prefill tokens", load.prefill_tokens
            yield "decode tokens", load.decode_tokens
            yield "waiting at replicas", ledger.waiting
            yield "unsent", ledger.unsent + ledger.pending + ledger.pending_tokens
        for totals in all_totals(orchestrator):
            yield "waiting", totals.waiting
            yield "running", totals.running
        lengths, work = pool.serving.work
        yield "queue lengths", sum(map(abs, lengths)) + abs(pool.serving.total_queue_length)
        yield "work of all", sum(map(abs, work))
        yield "sent and unfinished", pool.serving.unreported.in_flight
        yield "in the flow", pool.flow.queued
        yield "queued at the head", metrics.queued_in[pool.stage_id]()
        if admission is not None:
            yield "queued by class", sum(map(sum, admission.backlog_by_class().values()))
            named, others = admission.tenant_reports()
            for report in (*named.values(), others):
                yield "of tenants", sum(report.waiting) + report.in_flight
            yield "expected waits", sum(admission.expected_waits().values())
        yield "held, paused, moving", metrics.held + metrics.paused + metrics.moves_waiting
        yield "requests", len(orchestrator.request_states)
        yield "queued", orchestrator.front_end.queued
        yield "in engines", sum(engine.unfinished for engine in self._engines.values())

    async def settle(self) -> None:
        """Return when everything that has begun to happen has come to its end. Raises what any of it raised."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _done(self, task: "asyncio.Task[None]") -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._loop.call_exception_handler({"message": "a fault went wrong", "exception": error})

    def _join(self, member: PoolMember) -> None:
        self._started += 1
        engine = PlayedEngine(f"replica-{self._started}", self._rng)
        if member not in self._engines:
            self.orchestrator.replica_joined(member, _READY)
        self._engines[member] = engine
        client = StageClient(
            engine,
            PlayedApi(),
            member.name,
            partial(self.orchestrator.outputs_received, member),
            partial(self._on_dead, member),
        )
        client.start()
        self.orchestrator.replica_serves(member, client, engine.input_addr, engine.output_addr, _READY)

    def _on_dead(self, member: PoolMember, reason: str) -> None:
        if member.client is not None:
            self.orchestrator.replica_lost(member, reason)

    def _lose(self, member: PoolMember) -> None:
        """Its engine is ended from outside; who watches it says so."""
        client = member.client
        self._engines[member].end()
        if client is not None:
            client.mark_dead("its process was ended by SIGKILL")

    def _leave(self, member: PoolMember) -> None:
        self._lose(member)
        self.orchestrator.replica_left(member)
        del self._engines[member]

    def _pick(self) -> PoolMember | None:
        """One that serves and that nothing befalls, if there are others."""
        serving = [member for member in self.pool.serving if member not in self._befallen]
        return self._rng.choice(serving) if len(serving) > 1 else None

    async def _crash(self) -> None:
        member = self._pick()
        if member is None:
            return
        self._befallen.add(member)
        self._engines[member].die()
        await asyncio.sleep(self._rng.uniform(20, 120))
        self._join(member)
        self._befallen.discard(member)

    async def _replace(self) -> None:
        member = self._pick()
        if member is None:
            return
        self._leave(member)
        await asyncio.sleep(self._rng.uniform(5, 300))
        self._join(self.pool.add())

    async def _end(self) -> None:
        member = self._pick()
        if member is None:
            return
        self._befallen.add(member)
        self.orchestrator.cordon(member, DRAIN_CORDON)
        await self.pool.when_idle(member)
        self._leave(member)
        self._befallen.discard(member)
        await asyncio.sleep(self._rng.uniform(5, 300))
        self._join(self.pool.add())

    async def _drain(self) -> None:
        await self._cordon(ADMIN_CORDON, 300)

    async def _delay_heartbeats(self) -> None:
        await self._cordon(LATE_CORDON, 10)

    async def _cordon(self, reason: str, at_most_s: float) -> None:
        member = self._pick()
        if member is None:
            return
        self._befallen.add(member)
        self.orchestrator.cordon(member, reason)
        await asyncio.sleep(self._rng.uniform(1, at_most_s))
        self.orchestrator.uncordon(member, reason)
        self._befallen.discard(member)

    async def _scale(self) -> None:
        joined = [self.pool.add() for _ in range(self._rng.randint(1, 4))]
        self._befallen.update(joined)
        for member in joined:
            self._join(member)
        await asyncio.sleep(3600)
        for member in joined:
            self.orchestrator.cordon(member, DRAIN_CORDON)
        for member in joined:
            await self.pool.when_idle(member)
            self._leave(member)
        self._befallen.difference_update(joined)

    async def _lose_all(self) -> None:
        lost = [member for member in self.pool.members if member not in self._befallen]
        self._befallen.update(lost)
        # All at once, but the head learns of one after the other.
        for member in lost:
            self._engines[member].end()
        for member in lost:
            self._lose(member)
        await asyncio.sleep(self._rng.uniform(5, 1.5 * WAIT_S))
        for member in lost:
            self._join(member)
            await asyncio.sleep(self._rng.uniform(0, 2))
        self._befallen.difference_update(lost)
