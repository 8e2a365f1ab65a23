"""Who waits before whom, for how long at most, and who is refused: of one stage at one head."""

from http import HTTPStatus
from itertools import count
from math import ceil
from typing import NamedTuple

from vllm_omni_plugin.admission.admission_config import AdmissionConfig, RequestClass
from vllm_omni_plugin.admission.class_queue import Backlog, ClassQueue
from vllm_omni_plugin.admission.request_terms import Refusal, RefusalReason, RequestTerms
from vllm_omni_plugin.admission.tenant_accounts import ACTIVE_S, TenantAccount, TenantAccounts
from vllm_omni_plugin.admission.tenant_labels import TenantLabels
from vllm_omni_plugin.admission.ticket import Ticket, TicketPhase
from vllm_omni_plugin.admission.wait_queue import StageView, WaitQueue, total

MAX_RETRY_AFTER_S = 60
_MEMORY = 1 / 64
"""Weight of the latest answer in the mean length of all."""


class QueuePosition(NamedTuple):
    """Where a request would stand if it had to wait.

    Attributes:
        class_name: its class.
        ahead: requests of this head that would start before it, about.
        wait_s: seconds until it would start, about; 0 while the rate is not known.
        leaves_headroom: see `Admission.leaves_headroom`.
    """

    class_name: str
    ahead: float
    wait_s: float
    leaves_headroom: bool


class TenantReport(NamedTuple):
    """A tenant, or several as one, for metrics.

    Attributes:
        waiting: what waits.
        in_flight: requests that wait or run.
        served_tokens: of requests that have ended, see `TenantLabels`.
        weight: its share.
    """

    waiting: Backlog
    in_flight: int
    served_tokens: int
    weight: float


class Admission:
    """The rules of one head for the stage in which its requests begin.

    Classes are served strictly in order, in a class lower priorities first, and among equals by start-time fair
    queueing over tenants (Goyal, Vin and Cheng, SIGCOMM 1996) with tokens as the cost, as VTC has it (Sheng et al.,
    OSDI 2024). The order is fixed at arrival, which deficit round robin cannot do, so that the lines of several
    replicas can share it. A full queue is shortened where it is longest, in the lowest class first.

    A ticket is made when a request comes, and ended once. In between it may wait, and start: `ticket` -> (`wait`) ->
    `started` -> `ended`. It is judged when it begins to wait, and not again, for whichever replica it waits then. One
    that has started is refused only if its engine is lost or refuses it before the first output: by `overdue`.
    Belongs to the orchestrator's loop, but for `refusal` and the reports, which any thread may ask. Time is
    in monotonic seconds.

    Args:
        plan: what the operator wants.
        stage: how the stage does.
    """

    def __init__(self, plan: AdmissionConfig, stage: StageView) -> None:
        self._stage = stage
        self._accounts = TenantAccounts(plan)
        self._queues = WaitQueue(plan, stage)
        self._numbers = count()
        self._mean_output: float | None = None
        self._named = TenantLabels()
        self._name_configured()

    @property
    def config(self) -> AdmissionConfig:
        """What it goes by."""
        return self._queues.plan

    def replace(self, plan: AdmissionConfig) -> None:
        """Go by another plan. What waits keeps its place, and accounts their counts. O(n)."""
        self._accounts.replace(plan)
        self._queues = self._queues.under(plan)
        self._name_configured()

    def new_ticket(self, terms: RequestTerms, priority: int, tokens: int, now: float) -> Ticket | Refusal:
        """Give a request its place in the order; or refuse it, because its tenant is at a limit of its own.

        Args:
            terms: what its client said.
            priority: OpenAI's, 0 if it has none.
            tokens: of its prompt.
            now: when it came.
        """
        account = self._accounts.get_or_create(terms.tenant)
        refused = self._over_limit(account, now)
        if refused is not None:
            return refused
        index = self.config.class_index(account.settings, priority)
        of_class = self.config.classes[index]
        start_tag = _start_tag(account, of_class.name, self._queues.of(of_class.name))
        tokens = max(1, tokens)
        mean_output = self._mean_output if account.mean_output is None else account.mean_output
        cost = tokens + (mean_output or 0.0)
        charge = cost / account.settings.weight
        account.finish_tags[of_class.name] = start_tag + charge
        account.use(cost, self._stage.heads, now)
        self._accounts.begin(account, now)
        self._named.come(account, self.config.tenants)
        allowed, patience = _allowed(terms, of_class), self._patience(terms, of_class)
        due = None if patience is None else now + patience
        deadline = None if allowed is None else now + allowed
        self._queues.of(of_class.name).last_came = now
        number = next(self._numbers)
        return Ticket(index, priority, start_tag, number, account, tokens, due, deadline, of_class.name, cost, charge)

    def may_refuse(self, terms: RequestTerms) -> bool:
        """Whether such a request may be refused while it waits, or by a limit. From any thread."""
        return terms.timeout_s is not None or self.config.can_refuse

    def expected_refusal(self, terms: RequestTerms, priority: int | None, now: float) -> Refusal | None:
        """Why a request would be refused that came now and had to wait; None if it would not, as far as is known.

        Args:
            terms: what its client said.
            priority: OpenAI's; None if it is not known, for what would be refused with the best one.
            now: the time.
        """
        queues, account = self._queues, self._account(terms)
        refused = self._over_limit(account, now)
        if refused is not None:
            return refused
        if not self.backlog.requests:
            # As far as is known it need not wait.
            return None
        index = queues.plan.class_index(account.settings, priority)
        of_class = queues.plan.classes[index]
        start_tag = _start_tag(account, of_class.name, queues.of(of_class.name))
        late_s = _late_s(queues, account, index, start_tag, self._patience(terms, of_class))
        return self._refused(account, 1, late_s, 0.0 if late_s else queues.excess(account, index))

    def queue_position(self, terms: RequestTerms, priority: int | None, now: float) -> QueuePosition:
        """Where a request would stand if it came now and had to wait."""
        queues, account = self._queues, self._account(terms)
        index = queues.plan.class_index(account.settings, priority)
        name = queues.plan.classes[index].name
        ahead = queues.ahead_of(account, index, _start_tag(account, name, queues.of(name)))
        return QueuePosition(name, ahead, queues.wait_s(ahead), self._leaves_headroom(account, name, now))

    def enqueue(self, ticket: Ticket, now: float) -> Refusal | list[tuple[Ticket, Refusal]]:
        """A request begins to wait, unless it is refused. One that has waited or started keeps its place.

        Returns:
            Why it is refused; or else those that are pushed out for it. The tickets of the refused are ended.
        """
        if ticket.phase is TicketPhase.ADMITTED:
            ticket.phase = TicketPhase.WAITING
            self._queues.of(ticket.class_name).add(ticket)
        if ticket.phase is not TicketPhase.NEW:
            return []
        queues, account = self._queues, ticket.tenant
        index = queues.place_of(ticket.class_name)
        patience = None if ticket.dispatch_by is None else ticket.dispatch_by - now
        late_s = _late_s(queues, account, index, ticket.start_tag, patience)
        pushed_out, excess = ([], 0.0) if late_s else queues.make_room(ticket)
        refused = self._refused(account, ticket.tokens, late_s, excess)
        if refused is not None:
            self._end_unstarted(ticket, now)
            return refused
        refusals = self._pushed_out(pushed_out)
        for each in pushed_out:
            each.phase = TicketPhase.NEW
            self._end_unstarted(each, now)
        ticket.phase = TicketPhase.WAITING
        queues.of(ticket.class_name).add(ticket)
        return list(zip(pushed_out, refusals, strict=True))

    def dequeue(self, ticket: Ticket) -> None:
        """It waits no longer, if it did, and may come to wait elsewhere. Part of `started`, `overdue` and `ended`."""
        if ticket.phase is TicketPhase.WAITING:
            ticket.phase = TicketPhase.ADMITTED
            self._queues.of(ticket.class_name).remove(ticket)

    def expire(self, ticket: Ticket, now: float) -> Refusal:
        """It is due, and no engine has it or has begun to answer it: it is refused, and its ticket ended."""
        over = self._is_over_share(ticket.tenant)
        self._end_unstarted(ticket, now)
        return _refuse(over, RefusalReason.DEADLINE, "The request has waited as long as it may.")

    def leaves_headroom(self, ticket: Ticket, now: float) -> bool:
        """Whether it is to leave room at the engine: for tenants that have used less than their share, or for a
        higher class; as long as requests of these come at least once in `ACTIVE_S`."""
        return self._leaves_headroom(ticket.tenant, ticket.class_name, now)

    def started(self, ticket: Ticket) -> None:
        """An engine has got it, for the first time or again."""
        self.dequeue(ticket)
        if ticket.phase in (TicketPhase.NEW, TicketPhase.ADMITTED):
            ticket.phase = TicketPhase.STARTED
            self._accounts.started(ticket.tenant, ticket.cost)
            self._queues.of(ticket.class_name).started(ticket)

    def ended(self, ticket: Ticket, output_tokens: int, now: float) -> None:
        """It is over, in whatever way. Idempotent.

        Its tenant is charged for what it really cost, and for nothing if it never started.
        """
        if ticket.phase is TicketPhase.STARTED:
            account = ticket.tenant
            more = ticket.tokens + output_tokens - ticket.cost
            account.answered(ticket.tokens, output_tokens)
            self._named.answered(account, ticket.tokens + output_tokens)
            mean = self._mean_output
            self._mean_output = output_tokens if mean is None else mean + (output_tokens - mean) * _MEMORY
            self._close(ticket, more, more / account.settings.weight, now)
        else:
            self._end_unstarted(ticket, now)

    @property
    def backlog(self) -> Backlog:
        """What waits at this head."""
        return total(self.backlog_by_class().values())

    def backlog_by_class(self) -> dict[str, Backlog]:
        """What waits at this head of each class, in order."""
        return self._queues.by_class()

    def expected_waits(self) -> dict[str, float]:
        """Seconds until a request that came last in each class would start; 0 while the rate is not known."""
        waits, ahead = {}, 0
        for name, backlog in self.backlog_by_class().items():
            ahead += backlog.requests
            waits[name] = self._queues.wait_s(ahead)
        return waits

    def tenant_reports(self) -> tuple[dict[str, TenantReport], TenantReport]:
        """The tenants that metrics tell apart, and all others as one. O(tenants)."""
        named = {account.name: self._report(account, tokens) for account, tokens in self._named.served()}
        others = [self._report(account, 0) for account in self._accounts if account.name not in named]
        waiting = total(report.waiting for report in others)
        in_flight, weight = sum(report.in_flight for report in others), sum(report.weight for report in others)
        return named, TenantReport(waiting, in_flight, self._named.other_tokens, weight)

    def _leaves_headroom(self, account: TenantAccount, class_name: str, now: float) -> bool:
        return self._accounts.is_over_share(account, now) or self._queues.is_above(class_name, now - ACTIVE_S)

    def _patience(self, terms: RequestTerms, of_class: RequestClass) -> float | None:
        """Seconds that a request may wait for an engine, so that its first token comes in time; None: no deadline.

        At least half of its deadline: engines that are as slow as that may not keep it, but are not left idle for it.
        """
        allowed = _allowed(terms, of_class)
        return None if allowed is None else max(allowed - self._stage.first_output_s, allowed / 2)

    def _report(self, account: TenantAccount, served_tokens: int) -> TenantReport:
        waiting = self._queues.backlog_of(account.name)
        return TenantReport(waiting, account.in_flight, served_tokens, account.settings.weight)

    def _name_configured(self) -> None:
        for name in self.config.tenants:
            self._named.come(self._accounts.get_or_create(name), self.config.tenants)

    def _account(self, terms: RequestTerms) -> TenantAccount:
        """The account of a tenant, or what it would be. From any thread."""
        known = self._accounts.get(terms.tenant)
        return known or TenantAccount(terms.tenant, self._accounts.settings_of(terms.tenant))

    def _is_over_share(self, account: TenantAccount, more: int = 0) -> bool:
        """Whether, with so many tokens more, it has more of what waits than is its share among active tenants."""
        weight, active = account.settings.weight, self._accounts.active_weight
        if not account.in_flight:
            active += weight
        own = self._queues.backlog_of(account.name).tokens + more
        # Not for what rounding has left of weights.
        return own * active > (self.backlog.tokens + more) * weight * (1 + 1e-9)

    def _over_limit(self, account: TenantAccount, now: float) -> Refusal | None:
        heads = self._stage.heads
        if account.is_over_in_flight(heads):
            message = f"The tenant has {account.in_flight} requests in flight, as many as it may."
            return _refuse(True, RefusalReason.IN_FLIGHT, message)
        debt_s = account.debt_s(heads, now)
        if debt_s:
            message = f"The tenant has used more than its {account.settings.tokens_per_s:g} tokens per second."
            return _refuse(True, RefusalReason.TOKEN_RATE, message, debt_s)
        return None

    def _refused(self, account: TenantAccount, tokens: int, late_s: float, excess: float) -> Refusal | None:
        """Why a request of so many tokens is refused that would be so late, or for which so many are too many."""
        if late_s:
            message = f"The request's first token would come about {late_s:.1f} s later than it may."
            return _refuse(self._is_over_share(account, tokens), RefusalReason.DEADLINE, message, late_s)
        if excess:
            over, drained_s = self._is_over_share(account, tokens), self._queues.drained_in(excess)
            return _refuse(over, RefusalReason.QUEUE_FULL, "The queue is full.", drained_s)
        return None

    def _pushed_out(self, tickets: list[Ticket]) -> list[Refusal]:
        """Why each of these, which were just taken out of the queues, waits no longer."""
        taken: dict[str, int] = {}
        for ticket in tickets:
            taken[ticket.tenant.name] = taken.get(ticket.tenant.name, 0) + ticket.tokens
        message = "The queue is full, and the request had to make room for another."
        retry_after_s = self._queues.drained_in(len(tickets))
        return [
            _refuse(
                self._is_over_share(each.tenant, taken[each.tenant.name]), RefusalReason.EVICTED, message, retry_after_s
            )
            for each in tickets
        ]

    def _end_unstarted(self, ticket: Ticket, now: float) -> None:
        self.dequeue(ticket)
        self._close(ticket, -ticket.cost, -ticket.virtual_cost, now)

    def _close(self, ticket: Ticket, tokens: float, charge: float, now: float) -> None:
        """Correct what its tenant was charged, once."""
        if ticket.phase is TicketPhase.ENDED:
            return
        account = ticket.tenant
        if ticket.phase is TicketPhase.STARTED:
            self._accounts.ran(account, ticket.cost, ticket.cost + tokens, now)
        ticket.phase = TicketPhase.ENDED
        account.finish_tags[ticket.class_name] = account.finish_tags.get(ticket.class_name, 0.0) + charge
        account.use(tokens, self._stage.heads, now)
        self._accounts.end(account, now)


def _allowed(terms: RequestTerms, of_class: RequestClass) -> float | None:
    """Seconds from a request's arrival to its first token; None: any."""
    return min((each for each in (terms.timeout_s, of_class.deadline) if each is not None), default=None)


def _start_tag(account: TenantAccount, class_name: str, queue: ClassQueue) -> float:
    return max(queue.virtual_time, account.finish_tags.get(class_name, 0.0))


def _late_s(queues: WaitQueue, account: TenantAccount, index: int, start_tag: float, patience: float | None) -> float:
    """Seconds by which an engine would get a request too late; 0 if in time."""
    if patience is None:
        return 0.0
    return max(0.0, queues.sent_in(queues.ahead_of(account, index, start_tag)) - patience)


def _refuse(over: bool, reason: RefusalReason, message: str, retry_after_s: float = 0.0) -> Refusal:
    status = HTTPStatus.TOO_MANY_REQUESTS if over else HTTPStatus.SERVICE_UNAVAILABLE
    return Refusal(status, reason, message, min(MAX_RETRY_AFTER_S, max(1, ceil(retry_after_s))))
