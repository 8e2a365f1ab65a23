"""Several heads in front of the same simulated engines, each with its own policy and accounting."""

import asyncio
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from simulator.engine import Outcome
from simulator.head import Head, Policy
from simulator.replica import Clock, SimReplica
from simulator.requests import Job, Request
from vllm_omni_plugin.balancing import CacheChange, ReplicaLoad, ServingReplicas
from vllm_omni_plugin.coordinator import PeerWork, ReplicaWork, Welcome
from vllm_omni_plugin.orchestrator.pool.work_exchange import REPORT_INTERVAL_S, PeerWorkChanges, WorkExchange
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun
from vllm_omni_plugin.sim import EngineSettings
from vllm_omni_plugin.vllm_api.requests.engine_types import LoadReport

After = Callable[..., Any]
"""Calls a function after some seconds, the first argument."""


class SharedReplica(SimReplica):
    """One head's view of an engine that several heads use."""

    remote = True

    def __init__(self, replica: SimReplica, settings: EngineSettings, clock: Clock) -> None:
        super().__init__(replica.replica_id, settings, clock)
        self.engine_key = replica.replica_id
        self.exchange: WorkExchange | None = None
        self.engine = replica.engine

    def attach(self, replica: SimReplica) -> None:
        """The engine was restarted."""
        self.restart()
        self.engine = replica.engine
        if self.exchange is not None:
            self.ledger.set_peer_work(self.exchange.add_member(cast(Any, self)))

    @property
    def load(self) -> ReplicaLoad:
        """What this head knows: it gets only the tokens of its own requests."""
        tokens = sum(
            job.prompt_tokens + self.engine.produced(job, self._clock.now)
            for job, run in self.in_flight.items()
            if run.has_output
        )
        return self.ledger.load._replace(decode_tokens=tokens)

    def charge(self, job: Job, run: StageRun) -> None:
        super().charge(job, run)
        self._tell_peers()

    def settle(self, report: LoadReport | None) -> None:
        super().settle(report)
        self._tell_peers()

    def _tell_peers(self) -> None:
        if self.exchange is not None:
            self.exchange.changed(cast(Any, self))


class SharingHead(Head):
    """One of several heads."""

    aware = True
    """Whether its policy takes into account that other heads choose as well."""

    def __init__(self, policy: Policy, clock: Clock, send: Callable[[SimReplica, Job], None]) -> None:
        super().__init__(policy, clock, send)
        self.engines_report = _follows_caches(policy)

    def handle_reports(self, heads: int, others_work: PeerWorkChanges) -> None:
        """Handle reports of the other heads; `heads` includes this one."""
        if self.aware:
            self.unreported.set_heads(heads)
        for member, work in others_work:
            member.ledger.set_peer_work(work)
            self.serving.update(cast(Any, member), member.ledger)
            self.fill(cast(Any, member))

    def submit(self, request: Request) -> None:
        if self.unreported.heads > 1:
            self.unreported.estimate(self._clock.now, self.serving.total_queue_length)
        super().submit(request)
        self.unreported.in_flight += 1

    def lose(self, replica: SimReplica) -> list[Job]:
        lost = super().lose(replica)
        self.unreported.in_flight -= len(lost)
        replica.in_flight.clear()
        exchange = cast(SharedReplica, replica).exchange
        if exchange is not None:
            exchange.remove_member(cast(Any, replica))
        return lost

    def receive(
        self, replica: SimReplica, outcome: Outcome, report: LoadReport | None, change: CacheChange | None
    ) -> list[Request]:
        self.unreported.in_flight -= len(outcome.ended)
        return super().receive(replica, outcome, report, change)


class SeveralHeads(Head):
    """Replaces the one head of a simulation. Each request goes to a random head.

    Args:
        policies: one for each head.
        delay: maximum seconds until heads know each other's work; None: they do not exchange it.
        aware: see `SharingHead.aware`.
    """

    def __init__(
        self,
        policies: Sequence[Policy],
        replicas: Sequence[SimReplica],
        settings: EngineSettings,
        clock: Clock,
        after: After,
        send: Callable[[SimReplica, Job], None],
        delay: float | None,
        aware: bool,
        rng: random.Random,
        make_head: Callable[..., SharingHead] = SharingHead,
    ) -> None:
        super().__init__(policies[0], clock, send)
        self.serving = ServingReplicas(replicas)
        self.engines_report = _follows_caches(policies[0])
        self._rng = rng
        self._replicas = replicas
        self._owners: dict[Job, SharingHead] = {}
        self._heads: list[SharingHead] = []
        # By the indexes of heads and replicas.
        self._views: list[list[SharedReplica]] = []
        for number, policy in enumerate(policies):
            self._heads.append(make_head(policy, clock, partial(self._send_of, number)))
        for head in self._heads:
            head.aware = aware
            self._views.append([SharedReplica(replica, settings, clock) for replica in replicas])
            for view in self._views[-1]:
                head.serve(view)
        if self.engines_report:
            for replica in replicas:
                replica.engine.cache.record_changes()
        if delay is not None and len(policies) > 1:
            self._exchange_work(after, delay)

    def serve(self, replica: SimReplica) -> None:
        super().serve(replica)
        for head, view in self._views_of(replica):
            if view.engine is not replica.engine:
                view.attach(replica)
            head.serve(view)

    def cordon(self, replica: SimReplica) -> None:
        super().cordon(replica)
        for head, view in self._views_of(replica):
            head.cordon(view)

    def lose(self, replica: SimReplica) -> list[Job]:
        self.cordon(replica)
        lost = [job for head, view in self._views_of(replica) for job in head.lose(view)]
        for job in lost:
            self._owners.pop(job, None)
        return lost

    def is_idle(self, replica: SimReplica) -> bool:
        return not self.in_flight(replica.replica_id)

    def submit(self, request: Request) -> None:
        self._rng.choice(self._heads).submit(request)

    def fill(self, replica: SimReplica) -> None:
        for head, view in self._views_of(replica):
            head.fill(view)

    def _send_of(self, number: int, replica: SimReplica, job: Job) -> None:
        self._owners[job] = self._heads[number]
        self._send(self._replicas[replica.replica_id], job)

    def receive(
        self, replica: SimReplica, outcome: Outcome, report: LoadReport | None, change: CacheChange | None
    ) -> list[Request]:
        """Each head gets its own outputs and the cache changes; only the first head with outputs gets the report."""
        answered: list[Request] = []
        for head, view in self._views_of(replica):
            began = [job for job in outcome.began if self._owners[job] is head]
            ended = [job for job in outcome.ended if self._owners[job] is head]
            if began or ended:
                answered += head.receive(view, Outcome(began, ended), report, change)
                report = None
            elif change is not None:
                head.receive(view, Outcome([], []), None, change)
        for job in outcome.ended:
            del self._owners[job]
        return answered

    def in_flight(self, place: int) -> list[Job]:
        """Jobs of all heads on a replica."""
        return [job for views in self._views for job in views[place].in_flight]

    def _views_of(self, replica: SimReplica) -> list[tuple[SharingHead, SharedReplica]]:
        return [(head, views[replica.replica_id]) for head, views in zip(self._heads, self._views, strict=True)]

    def _tell(self, hook: str, *args: Any) -> None:
        """Nothing: each head calls the hooks of its own policy."""

    def _exchange_work(self, after: After, delay: float) -> None:
        interval = min(delay, REPORT_INTERVAL_S)
        exchanges: list[WorkExchange] = []

        def call_later(seconds: float, function: Callable[[], None]) -> asyncio.TimerHandle:
            after(seconds, function)
            return cast(asyncio.TimerHandle, function)

        def report(number: int, work: Sequence[ReplicaWork], full: bool) -> None:
            for other, exchange in enumerate(exchanges):
                if other != number:
                    after(
                        delay - interval, receive, self._heads[other], exchange, PeerWork(str(number), full, list(work))
                    )

        def receive(head: SharingHead, exchange: WorkExchange, message: PeerWork) -> None:
            others_work = exchange.handle(message)
            head.handle_reports(exchange.heads, others_work)

        for number, views in enumerate(self._views):
            exchange = WorkExchange(partial(report, number), interval, call_later)
            exchanges.append(exchange)
            for replica in views:
                replica.exchange = exchange
                replica.ledger.set_peer_work(exchange.add_member(cast(Any, replica)))
            exchange.handle(Welcome([]))


def _follows_caches(policy: Policy) -> bool:
    """Whether it gets cache changes: engines that heads share always report them."""
    return hasattr(policy, "cache_changed")
