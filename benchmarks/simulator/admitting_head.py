"""A simulated head with the real `Admission`: its queue is ordered and bounded."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import Any

from simulator.engine import Outcome
from simulator.head import Head, Policy
from simulator.replica import Clock, SimReplica
from simulator.requests import Job, Request
from vllm_omni_plugin.admission import Admission, AdmissionConfig, Backlog, HeadroomSize, Ticket
from vllm_omni_plugin.balancing import CacheChange
from vllm_omni_plugin.errors import RequestRefusedError
from vllm_omni_plugin.orchestrator.pool.stage_flow import StageFlow
from vllm_omni_plugin.vllm_api.requests.engine_types import LoadReport


@dataclass
class OnlyStage:
    """The `StageView` of the only stage. This is its only head."""

    flow: StageFlow
    unstarted: int = 0
    heads: int = 1

    @property
    def send_rate(self) -> float:
        return self.flow.leaving_rate or 0.0

    @property
    def first_output_s(self) -> float:
        return self.flow.first_output_s

    @property
    def other_heads_backlog(self) -> Mapping[str, Backlog]:
        return {}


class AdmittingHead(Head):
    """Refuses requests as `orchestrator.dispatch.HeadQueue` does, for simulations without incidents.

    Args:
        policy: must bind late.
        refuse: called for each refused request.
        after: schedules an event of the simulation.
    """

    def __init__(
        self,
        policy: Policy,
        clock: Clock,
        send: Callable[[SimReplica, Job], None],
        config: AdmissionConfig,
        refuse: Callable[[Request], None],
        after: Callable[..., Any],
    ) -> None:
        super().__init__(policy, clock, partial(self._start, send))
        self._stage = OnlyStage(StageFlow(clock))
        self._admission = Admission(config, self._stage)
        self._refuse = refuse
        self._after = after
        self._tickets: dict[Request, Ticket] = {}
        self._by_number: dict[int, Request] = {}
        self._sent_at: dict[Request, float] = {}

    def submit(self, request: Request) -> None:
        now = self._clock.now
        ticket = self._admission.new_ticket(request.terms, 0, request.prompt_tokens, now)
        if isinstance(ticket, RequestRefusedError):
            self._refuse(request)
            return
        self._tickets[request] = ticket
        self._by_number[ticket.number] = request
        super().submit(request)
        if (job := self._waiting_job(request)) is None:
            return
        outcome = self._admission.enqueue(ticket, now)
        if isinstance(outcome, RequestRefusedError):
            self._drop(request, job)
            return
        for other, _ in outcome:
            evicted = self._by_number[other.number]
            evicted_job = self._waiting_job(evicted)
            assert evicted_job is not None
            self._drop(evicted, evicted_job)
        if ticket.send_by < inf:
            self._after(ticket.send_by - now, self._expire, request)

    def receive(
        self, replica: SimReplica, outcome: Outcome, report: LoadReport | None, change: CacheChange | None
    ) -> list[Request]:
        now = self._clock.now
        for job in outcome.began:
            self._stage.unstarted -= 1
            in_engine_s = now - self._sent_at.pop(job.request)
            self._stage.flow.first_output(now, job.prompt_tokens, job.cached_tokens, in_engine_s)
        answered = super().receive(replica, outcome, report, change)
        for request in answered:
            ticket = self._tickets.pop(request)
            del self._by_number[ticket.number]
            self._admission.ended(ticket, request.output_tokens, now)
        return answered

    def _is_over_share(self, request: Request) -> bool:
        return self._admission.is_over_share(self._tickets[request], self._clock.now)

    def _headroom_size(self) -> HeadroomSize:
        return self._admission.config.headroom

    def _key(self, request: Request) -> Any:
        return self._tickets[request]

    def _start(self, send: Callable[[SimReplica, Job], None], replica: SimReplica, job: Job) -> None:
        self._stage.unstarted += 1
        self._stage.flow.entered(self._clock.now)
        self._sent_at[job.request] = self._clock.now
        self._admission.started(self._tickets[job.request])
        send(replica, job)

    def _expire(self, request: Request) -> None:
        job = self._waiting_job(request)
        if job is not None:
            self._admission.expire(self._tickets[request], self._clock.now)
            self._drop(request, job)

    def _drop(self, request: Request, job: Job) -> None:
        """Refuse a waiting request, whose ticket is ended."""
        del self._by_number[self._tickets.pop(request).number]
        run = self._runs[request]
        assert run.replica_id is not None
        self._tell("dispatch_cancelled", run.task, self.serving[run.replica_id], run.decision)
        self._withdraw(job)
        self._refuse(request)
