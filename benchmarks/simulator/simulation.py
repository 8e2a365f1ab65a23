"""The event loop: clients, links between head and engines, and incidents."""

from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Any

from simulator.admitting_head import AdmittingHead
from simulator.engine import LeapEngine, Outcome
from simulator.head import Head, Policy, Polling
from simulator.metrics import Metrics
from simulator.replica import Clock, SimReplica
from simulator.requests import Job, Request, Session
from simulator.workload import Incident, Workload
from vllm_omni_plugin.balancing import CacheChange
from vllm_omni_plugin.sim import EngineSettings
from vllm_omni_plugin.vllm_api.requests.engine_types import LoadReport

LINK_S = 0.0005
"""One-way latency between head and engine, with encoding."""
DETECTION_S = 0.1
"""From the death of an engine until the head notices."""
MOVES = 3
"""How often a request may lose its replica, the default of `--omni-migration-limit`."""
WAIT_S = 60.0
"""How long a request waits for a replica, the default of `--omni-replica-wait`."""


class Simulation:
    """One run of a workload under a policy.

    Args:
        policy: must not have been used before.

    Attributes:
        events: number of simulated events.
    """

    def __init__(self, workload: Workload, policy: Policy, settings: EngineSettings, replicas: int) -> None:
        self.metrics = Metrics()
        self.events = 0
        self._clock = Clock()
        self._queue: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = count()
        self._replicas = [SimReplica(number, settings, self._clock) for number in range(replicas)]
        self._measured_tenant = workload.measured_tenant
        if workload.admission is not None and getattr(policy, "binds_late", False):
            self._head: Head = AdmittingHead(
                policy, self._clock, self._send, workload.admission, self._refuse, self._after
            )
        else:
            self._head = Head(policy, self._clock, self._send)
        self._sessions = iter(workload.sessions)
        self._open: dict[Request, tuple[Session, int]] = {}
        self._waiting: list[Request] = []
        self._polling = policy if isinstance(policy, Polling) else None
        for replica in self._replicas:
            self._head.serve(replica)
        for incident in workload.incidents:
            self._at(incident.at, self._start_incident, incident)
        self._next_session()
        if self._polling is not None:
            self._at(0.0, self._tick)

    def run(self) -> Metrics:
        """Run until every request has ended."""
        clock, queue = self._clock, self._queue
        while self._open:
            clock.now, _, action, arguments = heappop(queue)
            self.events += 1
            action(*arguments)
        for replica in self._replicas:
            replica.serves(False)
        self.metrics.end(self._replicas)
        return self.metrics

    def _at(self, time: float, action: Callable[..., None], *arguments: Any) -> None:
        heappush(self._queue, (time, next(self._order), action, arguments))

    def _after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        self._at(self._clock.now + seconds, action, *arguments)

    def _next_session(self) -> None:
        session = next(self._sessions, None)
        if session is not None:
            self._open[session.turns[0]] = session, 0
            self._at(session.starts, self._begin_session, session)

    def _begin_session(self, session: Session) -> None:
        self._next_session()
        self._ask(session.turns[0])

    def _ask(self, request: Request) -> None:
        request.arrived = self._clock.now
        self._submit(request)

    def _submit(self, request: Request) -> None:
        if not self._head.serving:
            self._waiting.append(request)
            self._after(WAIT_S, self._give_up, request)
            return
        self._head.submit(request)

    def _send(self, replica: SimReplica, job: Job) -> None:
        self._after(LINK_S, self._arrive, replica, replica.engine, job)

    def _arrive(self, replica: SimReplica, engine: LeapEngine, job: Job) -> None:
        if engine is replica.engine and replica.alive:
            engine.submit(job, self._clock.now)
            self._expect(replica)

    def _expect(self, replica: SimReplica) -> None:
        engine = replica.engine
        if engine.next_time < inf and engine.next_time != replica.expected:
            replica.expected = engine.next_time
            self._at(engine.next_time, self._step, replica, engine)

    def _step(self, replica: SimReplica, engine: LeapEngine) -> None:
        # After this event was scheduled, an arrival may have shortened the leap, or the engine may have died.
        if engine is not replica.engine or not replica.alive or self._clock.now != engine.next_time:
            return
        outcome = engine.step()
        self._expect(replica)
        change = CacheChange(*engine.cache.take_changes()) if self._head.engines_report else None
        self._after(LINK_S, self._receive, replica, engine, outcome, replica.report(), change)

    def _receive(
        self,
        replica: SimReplica,
        engine: LeapEngine,
        outcome: Outcome,
        report: LoadReport,
        change: CacheChange | None,
    ) -> None:
        if engine is replica.engine and replica.alive:
            for request in self._head.receive(replica, outcome, report, change):
                self._answered(request)
            self._head.fill(replica)

    def _answered(self, request: Request) -> None:
        if self._measured_tenant in (None, request.terms.tenant):
            self.metrics.answered(request)
        session, turn = self._open.pop(request)
        if turn + 1 < len(session.turns):
            follower = session.turns[turn + 1]
            self._open[follower] = session, turn + 1
            self._after(session.pauses[turn], self._ask, follower)

    def _refuse(self, request: Request) -> None:
        """The client gives up the whole session."""
        self.metrics.refused += self._measured_tenant in (None, request.terms.tenant)
        del self._open[request]

    def _give_up(self, request: Request) -> None:
        if request in self._waiting:
            self._waiting.remove(request)
            self._refuse(request)

    def _tick(self) -> None:
        assert self._polling is not None
        self._polling.tick(self._head.serving)
        self._after(self._polling.tick_s, self._tick)

    def _start_incident(self, incident: Incident) -> None:
        replica = self._replicas[incident.replica]
        if incident.kind == "slow":
            replica.slowdown = replica.engine.slowdown = incident.factor
            return
        if incident.kind == "die":
            replica.alive = False
            self._after(DETECTION_S, self._lose, replica)
        else:
            self._head.cordon(replica)
        self._at(incident.until, self._return, replica)

    def _lose(self, replica: SimReplica) -> None:
        engine = replica.engine
        for job in self._head.lose(replica):
            job.request.produced += engine.produced(job, self._clock.now - DETECTION_S)
            job.request.moves += 1
            if job.request.moves > MOVES:
                self._refuse(job.request)
            else:
                self._submit(job.request)

    def _return(self, replica: SimReplica) -> None:
        """Restart a replica that died or left with an empty cache. One that has not finished its work goes on."""
        if replica.alive and self._head.is_idle(replica):
            self._head.lose(replica)
            replica.alive = False
        if not replica.alive:
            replica.restart()
        self._head.serve(replica)
        waiting, self._waiting = self._waiting, []
        for request in waiting:
            self._submit(request)
