"""Where requests come in: the rules of one head, and which requests have not gone to an engine yet."""

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

RefuseRun = Callable[[StageRun, RequestRefusedError], None]
"""Ends a run of its stage, whose request is refused."""

_NO_TERMS = RequestTerms()


class AdmissionGate:
    """Gives each request its ticket, and sees that it is judged once, whatever stages it runs through.

    Most come in at one stage. Where that is a prefill, those that skip it come in at the stage behind; what waits at
    either is one queue to `Admission`, whose questions are answered here (`StageView`) with what the first of them
    does. Lives on the orchestrator's loop; does no I/O.

    Args:
        pool: replicas of the stage at which requests come in.
        plan: who may come in, and in what order they wait.
        metrics: what it counts.
        clock: monotonic seconds.

    Attributes:
        admission: the rules.
    """

    def __init__(
        self, pool: StagePool, plan: AdmissionConfig, metrics: OrchestratorMetrics, clock: Callable[[], float]
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        # Of what waits here alone: while nothing does, requests leave at the rate at which they come.
        self._flow = StageFlow(clock)
        # By the number of its ticket, what waits, and how it is turned away if it must make room.
        self._waiting: dict[int, tuple[StageRun, RefuseRun]] = {}
        self.admission = Admission(plan, self)

    @property
    def dispatch_rate(self) -> float:
        """See `StageView`."""
        return self._flow.leaving_rate or 0.0

    @property
    def unstarted(self) -> int:
        """See `StageView`."""
        return max(0, self._pool.flow.queued - self._metrics.queued_in[self._pool.stage_id]())

    @property
    def first_output_s(self) -> float:
        """See `StageView`."""
        return self._pool.flow.first_output_s

    @property
    def heads(self) -> int:
        """See `StageView`."""
        return self._pool.heads

    @property
    def other_heads_backlog(self) -> Mapping[str, Backlog]:
        """See `StageView`."""
        exchange = self._pool.exchange
        if exchange is None:
            return {}
        return {each.name: Backlog(*exchange.others_waiting(each.name)) for each in self.admission.config.classes}

    def enter(self, message: SubmitRequest) -> Ticket:
        """A new request has come. Its ticket must be given to `left` in the end.

        Raises:
            RequestRefusedError: its tenant is at a limit.
        """
        terms, priority = message.terms or _NO_TERMS, message.request.priority
        ticket = self.admission.new_ticket(terms, priority, message.prompt_tokens, self._clock())
        if isinstance(ticket, RequestRefusedError):
            count_reason(self._metrics.refusals, (self._pool.stage_id, ticket.reason, str(ticket.status)))
            raise ticket
        return ticket

    def wait(self, run: StageRun, ticket: Ticket, turn_away: RefuseRun) -> None:
        """A request begins to wait, unless it has waited or started before; others may be turned away for it.

        Args:
            run: what waits.
            ticket: its ticket.
            turn_away: how this run is turned away, if another one needs its place.

        Raises:
            RequestRefusedError: it may not wait.
        """
        if ticket.phase not in (TicketPhase.NEW, TicketPhase.ADMITTED):
            return
        outcome = self.admission.enqueue(ticket, self._clock())
        if isinstance(outcome, RequestRefusedError):
            raise outcome
        self._waiting[ticket.number] = run, turn_away
        self._flow.sent(self._clock())
        self._tell_others(ticket.class_name)
        for pushed_out, refusal in outcome:
            other, turn_other_away = self._waiting[pushed_out.number]
            self._forget(pushed_out)
            turn_other_away(other, refusal)

    def started(self, ticket: Ticket) -> None:
        """An engine has got a request, or its work in one of the stages."""
        if ticket.phase is TicketPhase.WAITING:
            del self._waiting[ticket.number]
            self._flow.first_output(self._clock(), 0, None)
            self._tell_others(ticket.class_name)
        self.admission.started(ticket)

    def leave(self, ticket: Ticket) -> None:
        """A request waits no longer, if it did, and no engine gets it."""
        if ticket.phase is TicketPhase.WAITING:
            self._forget(ticket)
            self.admission.dequeue(ticket)

    def overdue(self, ticket: Ticket) -> RequestRefusedError:
        """A request has waited as long as it may. Returns what its client is told."""
        if ticket.phase is TicketPhase.WAITING:
            self._forget(ticket)
        return self.admission.expire(ticket, self._clock())

    def left(self, ticket: Ticket, output_tokens: int) -> None:
        """A request is over, in whatever way, after so many tokens of answer."""
        self.leave(ticket)
        self.admission.ended(ticket, output_tokens, self._clock())

    def _forget(self, ticket: Ticket) -> None:
        del self._waiting[ticket.number]
        self._flow.dropped(self._clock())
        self._tell_others(ticket.class_name)

    def _tell_others(self, class_name: str) -> None:
        if self._pool.exchange is not None:
            self._pool.exchange.set_waiting(class_name, partial(self._waiting_of, class_name))

    def _waiting_of(self, class_name: str) -> Work:
        return Work(*self.admission.backlog_by_class().get(class_name, NO_WORK))
