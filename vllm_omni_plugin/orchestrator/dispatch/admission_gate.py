"""Admission of requests to the fleet: each gets its ticket here, and is refused here if it may not wait."""

from collections.abc import Callable, Mapping
from functools import partial

from vllm_omni_plugin.admission import Admission, AdmissionConfig, Backlog, RequestTerms, Ticket, TicketPhase
from vllm_omni_plugin.errors import RequestRefusedError
from vllm_omni_plugin.orchestrator.pool.stage_flow import StageFlow
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics, count_reason
from vllm_omni_plugin.orchestrator.requests.load_ledger import NO_WORK, Work
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import SubmitRequest
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

EvictRun = Callable[[StageRun, RequestRefusedError], None]
"""Ends a waiting run of a stage, to make room for another request."""

_NO_TERMS = RequestTerms()


class AdmissionGate:
    """Gives each request its ticket, and lets `Admission` judge it once, whatever stages it runs through.

    Most requests enter at one stage. If that stage is a prefill, requests that skip it enter at the decode stage. What
    waits at either stage is one queue to `Admission`. The first of the two stages answers its questions (`StageView`).
    Lives on the orchestrator's loop; does no I/O.

    Args:
        pool: the replicas of the stage at which requests enter.
    """

    def __init__(
        self, pool: StagePool, config: AdmissionConfig, metrics: OrchestratorMetrics, clock: Callable[[], float]
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        # Only of waiting requests: while none waits, requests leave at the rate at which they come.
        self._flow = StageFlow(clock)
        # By the number of the ticket.
        self._waiting: dict[int, tuple[StageRun, EvictRun]] = {}
        self.admission = Admission(config, self)

    @property
    def send_rate(self) -> float:
        return self._flow.leaving_rate or 0.0

    @property
    def unstarted(self) -> int:
        return self._pool.flow.queued

    @property
    def first_output_s(self) -> float:
        return self._pool.flow.first_output_s

    @property
    def heads(self) -> int:
        return self._pool.unreported.heads

    @property
    def other_heads_backlog(self) -> Mapping[str, Backlog]:
        exchange = self._pool.exchange
        if exchange is None:
            return {}
        return {each.name: Backlog(*exchange.others_waiting(each.name)[:2]) for each in self.admission.config.classes}

    def issue_ticket(self, message: SubmitRequest) -> Ticket:
        """The ticket of a new request, to be given to `request_ended`; RequestRefusedError at a limit of its tenant."""
        terms = message.terms or _NO_TERMS
        priority = terms.allowed_priority(message.request.priority)
        ticket = self.admission.new_ticket(terms, priority, message.prompt_tokens, self._clock(), message.submitted_at)
        if isinstance(ticket, RequestRefusedError):
            count_reason(self._metrics.requests_refused, (self._pool.stage_id, ticket.reason, str(ticket.status)))
            raise ticket
        return ticket

    def enqueue(self, run: StageRun, ticket: Ticket, evict: EvictRun) -> None:
        """Let a request wait (or RequestRefusedError). One that has waited or started is not judged again.

        Others may be evicted for it; `evict` ends this run, if it has to make room later.
        """
        if ticket.phase not in (TicketPhase.NEW, TicketPhase.HAS_WAITED):
            return
        outcome = self.admission.enqueue(ticket, self._clock())
        if isinstance(outcome, RequestRefusedError):
            raise outcome
        self._waiting[ticket.number] = run, evict
        self._flow.entered(self._clock())
        self._report_backlog(ticket.class_name)
        for evicted, refusal in outcome:
            evicted_run, evict_it = self._waiting[evicted.number]
            self._drop(evicted)
            evict_it(evicted_run, refusal)

    def started(self, ticket: Ticket) -> None:
        """An engine has got the request, or its work in one of the stages."""
        if ticket.phase is TicketPhase.WAITING:
            del self._waiting[ticket.number]
            self._flow.first_output(self._clock(), 0, None)
            self._report_backlog(ticket.class_name)
        self.admission.started(ticket)

    def dequeue(self, ticket: Ticket) -> None:
        """The request does not wait any more, if it did, and no engine has got it."""
        if ticket.phase is TicketPhase.WAITING:
            self._drop(ticket)
            self.admission.dequeue(ticket)

    def expire(self, ticket: Ticket) -> RequestRefusedError:
        """The request's deadline has passed. Returns the error for its client."""
        if ticket.phase is TicketPhase.WAITING:
            self._drop(ticket)
        return self.admission.expire(ticket, self._clock())

    def request_ended(self, ticket: Ticket, output_tokens: int) -> None:
        """The request has ended, in whatever way, with so many tokens of answer."""
        self.dequeue(ticket)
        self.admission.ended(ticket, output_tokens, self._clock())

    def _drop(self, ticket: Ticket) -> None:
        del self._waiting[ticket.number]
        self._flow.dropped(self._clock())
        self._report_backlog(ticket.class_name)

    def _report_backlog(self, class_name: str) -> None:
        if self._pool.exchange is not None:
            self._pool.exchange.set_waiting(class_name, partial(self._backlog_of, class_name))

    def _backlog_of(self, class_name: str) -> Work:
        return Work(*self.admission.backlog_by_class().get(class_name, NO_WORK))
