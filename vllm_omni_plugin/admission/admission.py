"""Decides in which order the requests of one head start, how long they may wait, and which are refused."""

from enum import StrEnum
from http import HTTPStatus
from itertools import count
from math import ceil, inf
from typing import NamedTuple

from vllm_omni_plugin.admission.admission_config import AdmissionConfig, RequestClass
from vllm_omni_plugin.admission.class_queue import Backlog, ClassQueue
from vllm_omni_plugin.admission.tenant_accounts import ACTIVE_S, TenantAccount, TenantAccounts
from vllm_omni_plugin.admission.ticket import RequestTerms, Ticket, TicketPhase
from vllm_omni_plugin.admission.wait_queue import StageView, WaitQueue, total
from vllm_omni_plugin.errors import RequestRefusedError

MAX_RETRY_AFTER_S = 60
_ANSWER_WEIGHT = 1 / 64
"""Weight of the latest answer in the moving average of all tenants' answer lengths."""


class RefusalReason(StrEnum):
    """Why a request is refused: the label of the metric."""

    IN_FLIGHT = "in_flight"
    TOKEN_RATE = "token_rate"
    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline"
    EVICTED = "pushed_out"


class QueuePosition(NamedTuple):
    """Where a request would be if it had to wait.

    `ahead` requests of this head would start before it, and it would wait `wait_s` seconds, by estimates; 0 while the
    rate is not known. For `is_over_share` see the method of `Admission`.
    """

    class_name: str
    ahead: float
    wait_s: float
    is_over_share: bool


NO_QUEUE = QueuePosition("", 0.0, 0.0, False)
"""The position of every request without admission control."""


class TenantReport(NamedTuple):
    """Metrics of one tenant, or of several together. `in_flight` requests wait or run.

    `served_tokens`: of prompts and answers of requests that ended while the tenant was in the file; in the report of
    the others, while it was not.
    """

    waiting: Backlog
    in_flight: int
    served_tokens: int
    weight: float


class Admission:
    """Admission control of one head, for the stage at which its requests enter.

    Classes start strictly in order, in a class lower priorities first. Among equals, tenants share by start-time fair
    queueing (Goyal, Vin and Cheng, SIGCOMM 1996) with tokens as the cost, as in VTC (Sheng et al., OSDI 2024). The
    order is fixed at arrival, unlike with deficit round robin, so that the queues of several replicas can follow it. If
    the queue is full, the newest requests of the tenant that has most in the lowest class are evicted.

    The life of a ticket: `new_ticket` at arrival, `enqueue` if the request must wait, `started`, `ended`. A request
    is checked when it is enqueued for the first time, and not again if it then waits for another replica. After it has
    started it is refused only by `expire`, if its engine was lost or refused it before the first output.

    Only the orchestrator's loop may change it; any thread may call `may_refuse`, `expected_refusal` and the reports.
    Times are in monotonic seconds.
    """

    def __init__(self, config: AdmissionConfig, stage: StageView) -> None:
        self._stage = stage
        self._accounts = TenantAccounts(config)
        self._queue = WaitQueue(config, stage)
        self._numbers = count()
        self._mean_output: float | None = None
        # Of tenants that are not in the file.
        self._other_tokens = 0

    @property
    def config(self) -> AdmissionConfig:
        return self._queue.config

    def replace(self, config: AdmissionConfig) -> None:
        """Use another config. Waiting requests keep their places, tenants keep their counts. O(n)."""
        self._accounts.replace(config)
        self._queue = self._queue.with_config(config)

    def new_ticket(
        self, terms: RequestTerms, priority: int, tokens: int, now: float, submitted_at: float | None = None
    ) -> Ticket | RequestRefusedError:
        """Give a request its place in the order, or refuse it because its tenant is at a limit.

        `priority` is OpenAI's, 0 if the request has none; `tokens` are of the prompt. The deadline counts from
        `submitted_at`, in monotonic seconds, by default from now, less what the request has waited before.
        """
        account = self._accounts.get_or_create(terms.tenant)
        refusal = self._limit_refusal(account, now)
        if refusal is not None:
            return refusal
        index = self.config.class_index(account.settings, priority)
        request_class = self.config.classes[index]
        name = request_class.name
        queue = self._queue.of(name)
        start_tag = _start_tag(account, name, queue)
        tokens = max(1, tokens)
        mean_output = self._mean_output if account.mean_output is None else account.mean_output
        cost = tokens + (mean_output or 0.0)
        virtual_cost = cost / account.settings.weight
        account.finish_tags[name] = start_tag + virtual_cost
        account.spend(cost, self._stage.heads, now)
        self._accounts.add_in_flight(account, now)
        counts_from = (now if submitted_at is None else submitted_at) - terms.waited_s
        send_by = counts_from + self._send_limit_s(terms, request_class)
        deadline = counts_from + _deadline_s(terms, request_class)
        queue.last_arrival = now
        place = index, priority, start_tag, next(self._numbers)
        return Ticket(*place, account, tokens, send_by, deadline, name, cost, virtual_cost)

    def may_refuse(self, terms: RequestTerms) -> bool:
        """Whether such a request can be refused at all, while it waits or by a limit."""
        return terms.timeout_s is not None or self.config.can_refuse

    def expected_refusal(self, terms: RequestTerms, priority: int | None, now: float) -> RequestRefusedError | None:
        """Why a request would be refused if it came now and had to wait; None if it would not, or if that is unknown.

        Without `priority`, only what would be refused with any.
        """
        account = self._account(terms)
        refusal = self._limit_refusal(account, now)
        if refusal is not None:
            return refusal
        if not self.backlog.requests:
            # It probably need not wait.
            return None
        queue = self._queue
        index = queue.config.class_index(account.settings, priority)
        request_class = queue.config.classes[index]
        start_tag = _start_tag(account, request_class.name, queue.of(request_class.name))
        late_s = _late_s(queue, account, index, start_tag, self._send_limit_s(terms, request_class))
        return self._queue_refusal(account, 1, late_s, 0.0 if late_s else queue.excess(account, index))

    def longest_wait_s(self, terms: RequestTerms) -> float:
        """Seconds in which an engine must have such a request, whatever its priority; infinity without a deadline."""
        name = self._account(terms).settings.class_name
        classes = [each for each in self.config.classes if name in (None, each.name)]
        return max((self._send_limit_s(terms, each) for each in classes), default=inf)

    def queue_position(self, terms: RequestTerms, priority: int | None, now: float) -> QueuePosition:
        """Where a request would be if it came now and had to wait."""
        queue, account = self._queue, self._account(terms)
        index = queue.config.class_index(account.settings, priority)
        name = queue.config.classes[index].name
        ahead = queue.ahead_of(account, index, _start_tag(account, name, queue.of(name)))
        is_over_share = self._is_over_share(account, name, now)
        return QueuePosition(name, ahead, queue.start_s(ahead), is_over_share)

    def enqueue(self, ticket: Ticket, now: float) -> RequestRefusedError | list[tuple[Ticket, RequestRefusedError]]:
        """Let a request wait and return those that are evicted for it, or return why it is refused.

        Those that have waited or started are not checked again. The tickets of refused requests are ended.
        """
        if ticket.phase is TicketPhase.HAS_WAITED:
            ticket.phase = TicketPhase.WAITING
            self._queue.of(ticket.class_name).add(ticket)
        if ticket.phase is not TicketPhase.NEW:
            return []
        queue, account = self._queue, ticket.tenant
        index = queue.index_of(ticket.class_name)
        late_s = _late_s(queue, account, index, ticket.start_tag, ticket.send_by - now)
        evicted, excess = ([], 0.0) if late_s else queue.evict_for(ticket)
        refusal = self._queue_refusal(account, ticket.tokens, late_s, excess)
        if refusal is not None:
            self._end_unstarted(ticket, now)
            return refusal
        refusals = self._eviction_refusals(evicted)
        for each in evicted:
            each.phase = TicketPhase.NEW
            self._end_unstarted(each, now)
        ticket.phase = TicketPhase.WAITING
        queue.of(ticket.class_name).add(ticket)
        return list(zip(evicted, refusals, strict=True))

    def dequeue(self, ticket: Ticket) -> None:
        """Take a request out of the queue if it waits. It may be enqueued again."""
        if ticket.phase is TicketPhase.WAITING:
            ticket.phase = TicketPhase.HAS_WAITED
            self._queue.of(ticket.class_name).remove(ticket)

    def expire(self, ticket: Ticket, now: float) -> RequestRefusedError:
        """Refuse a request because no engine has it, or has begun to answer it, in time. Ends its ticket."""
        over_share = self._is_over_queue_share(ticket.tenant)
        self._end_unstarted(ticket, now)
        return _refusal(over_share, RefusalReason.DEADLINE, "No engine could begin the request by its deadline.")

    def is_over_share(self, ticket: Ticket, now: float) -> bool:
        """Whether a request is over its share, so that it must leave headroom at its replica.

        It is if its tenant has used more than its share and other tenants are active, or if requests of a higher class
        wait or have come in the last `ACTIVE_S` seconds.
        """
        return self._is_over_share(ticket.tenant, ticket.class_name, now)

    def started(self, ticket: Ticket) -> None:
        """An engine has the request, for the first time or again."""
        self.dequeue(ticket)
        if ticket.phase in (TicketPhase.NEW, TicketPhase.HAS_WAITED):
            ticket.phase = TicketPhase.STARTED
            self._accounts.add_running(ticket.tenant, ticket.cost)
            self._queue.of(ticket.class_name).started(ticket)

    def ended(self, ticket: Ticket, output_tokens: int, now: float) -> None:
        """The request has ended for whatever reason; its tenant pays its real cost if it has started. Idempotent."""
        if ticket.phase is TicketPhase.STARTED:
            account = ticket.tenant
            tokens = ticket.tokens + output_tokens
            correction = tokens - ticket.cost
            account.count_answer(output_tokens)
            if account.name in self.config.tenants:
                account.served_tokens += tokens
            else:
                self._other_tokens += tokens
            mean = self._mean_output
            self._mean_output = output_tokens if mean is None else mean + (output_tokens - mean) * _ANSWER_WEIGHT
            self._close(ticket, correction, correction / account.settings.weight, now)
        else:
            self._end_unstarted(ticket, now)

    @property
    def backlog(self) -> Backlog:
        return total(self.backlog_by_class().values())

    def backlog_by_class(self) -> dict[str, Backlog]:
        """The waiting requests of this head by class, in order."""
        return self._queue.backlog_by_class()

    def expected_waits(self) -> dict[str, float]:
        """By class, seconds until the last request of the class would start; 0 while the rate is not known."""
        waits, ahead = {}, 0
        for name, backlog in self.backlog_by_class().items():
            ahead += backlog.requests
            waits[name] = self._queue.start_s(ahead)
        return waits

    def tenant_reports(self) -> tuple[dict[str, TenantReport], TenantReport]:
        """The tenants of the admission file by name, and all others as one. O(tenants). For any thread."""
        configured = self.config.tenants
        named, others = {}, []
        for account in self._accounts:
            waiting = self._queue.backlog_of(account.name)
            report = TenantReport(waiting, account.in_flight, account.served_tokens, account.settings.weight)
            if account.name in configured:
                named[account.name] = report
            else:
                others.append(report)
        waiting, in_flight = total(each.waiting for each in others), sum(each.in_flight for each in others)
        return named, TenantReport(waiting, in_flight, self._other_tokens, sum(each.weight for each in others))

    def _is_over_share(self, account: TenantAccount, class_name: str, now: float) -> bool:
        """Whether the tenant has used too much, or a higher class has waited lately: it leaves some room free."""
        return self._accounts.has_used_more_than_share(account, now) or self._queue.has_higher_class(
            class_name, now - ACTIVE_S
        )

    def _send_limit_s(self, terms: RequestTerms, request_class: RequestClass) -> float:
        """Seconds in which an engine must have a request so that its first token comes in time.

        At least half of the deadline: if engines need longer than that, the request may be late, but is not refused.
        """
        deadline_s = _deadline_s(terms, request_class)
        return max(deadline_s - self._stage.first_output_s, deadline_s / 2)

    def _account(self, terms: RequestTerms) -> TenantAccount:
        """The tenant's account, or a new one that is not kept. For any thread."""
        known = self._accounts.get(terms.tenant)
        return known or TenantAccount(terms.tenant, self._accounts.settings_of(terms.tenant))

    def _is_over_queue_share(self, account: TenantAccount, more: int = 0) -> bool:
        """Whether a tenant has more than its share of the waiting tokens, once so many tokens are added."""
        weight, active_weight = account.settings.weight, self._accounts.active_weight
        if not account.in_flight:
            active_weight += weight
        own = self._queue.backlog_of(account.name).tokens + more
        # The factor ignores rounding errors.
        return own * active_weight > (self.backlog.tokens + more) * weight * (1 + 1e-9)

    def _limit_refusal(self, account: TenantAccount, now: float) -> RequestRefusedError | None:
        """The refusal by a tenant's own limit: requests in flight, else tokens per second; None if there is none."""
        heads = self._stage.heads
        if account.is_at_in_flight_limit(heads):
            limit = _limit_of(heads, f"max_in_flight {account.settings.max_in_flight}")
            requests = "1 request" if account.in_flight == 1 else f"{account.in_flight} requests"
            message = f"The tenant has {requests} in flight at this head, which is {limit}."
            return _refusal(True, RefusalReason.IN_FLIGHT, message)
        debt_s = account.debt_s(heads, now)
        if debt_s:
            limit = _limit_of(heads, f"tokens_per_s {account.settings.tokens_per_s:g}")
            message = f"The tenant has used more tokens at this head than {limit}."
            return _refusal(True, RefusalReason.TOKEN_RATE, message, debt_s)
        return None

    def _queue_refusal(
        self, account: TenantAccount, tokens: int, late_s: float, excess: float
    ) -> RequestRefusedError | None:
        """Why a request is refused that would be late, or for which the queue has too many requests."""
        if late_s:
            message = f"The request's first token would come about {late_s:.1f} s after its deadline."
            return _refusal(self._is_over_queue_share(account, tokens), RefusalReason.DEADLINE, message, late_s)
        if excess:
            message = "The queue is full. Its limits are max_waiting_requests, max_waiting_tokens and max_wait."
            over_share, drain_s = self._is_over_queue_share(account, tokens), self._queue.drain_s(excess)
            return _refusal(over_share, RefusalReason.QUEUE_FULL, message, drain_s)
        return None

    def _eviction_refusals(self, tickets: list[Ticket]) -> list[RequestRefusedError]:
        """What clients get whose requests were just taken out of the queue."""
        evicted: dict[str, int] = {}
        for ticket in tickets:
            evicted[ticket.tenant.name] = evicted.get(ticket.tenant.name, 0) + ticket.tokens
        message = "The queue is full, and another request took the place of this one."
        drain_s = self._queue.drain_s(len(tickets))
        over_share = [self._is_over_queue_share(each.tenant, evicted[each.tenant.name]) for each in tickets]
        return [_refusal(each, RefusalReason.EVICTED, message, drain_s) for each in over_share]

    def _end_unstarted(self, ticket: Ticket, now: float) -> None:
        self.dequeue(ticket)
        self._close(ticket, -ticket.cost, -ticket.virtual_cost, now)

    def _close(self, ticket: Ticket, tokens: float, virtual_tokens: float, now: float) -> None:
        """End a ticket once, and correct what its tenant was charged by so many tokens."""
        if ticket.phase is TicketPhase.ENDED:
            return
        account = ticket.tenant
        if ticket.phase is TicketPhase.STARTED:
            self._accounts.remove_running(account, ticket.cost, ticket.cost + tokens, now)
        ticket.phase = TicketPhase.ENDED
        account.finish_tags[ticket.class_name] = account.finish_tags.get(ticket.class_name, 0.0) + virtual_tokens
        account.spend(tokens, self._stage.heads, now)
        self._accounts.remove_in_flight(account, now)


def _deadline_s(terms: RequestTerms, request_class: RequestClass) -> float:
    """Seconds from arrival to the first token; infinity without a deadline."""
    return min((each for each in (terms.timeout_s, request_class.deadline) if each is not None), default=inf)


def _start_tag(account: TenantAccount, class_name: str, queue: ClassQueue) -> float:
    return max(queue.virtual_time, account.finish_tags.get(class_name, 0.0))


def _late_s(queue: WaitQueue, account: TenantAccount, index: int, start_tag: float, limit_s: float) -> float:
    """Seconds by which a request would be sent too late; 0 if it would be in time."""
    return max(0.0, queue.seconds(queue.ahead_of(account, index, start_tag)) - limit_s)


def _limit_of(heads: int, limit: str) -> str:
    return f"its limit ({limit})" if heads == 1 else f"its part of the limit ({limit}, divided among {heads} heads)"


def _refusal(over_share: bool, reason: RefusalReason, message: str, retry_after_s: float = 0.0) -> RequestRefusedError:
    """429 if the tenant is over its share or limit, 503 if the fleet is full; Retry-After is bounded."""
    status = HTTPStatus.TOO_MANY_REQUESTS if over_share else HTTPStatus.SERVICE_UNAVAILABLE
    return RequestRefusedError(status, reason, message, min(MAX_RETRY_AFTER_S, max(1, ceil(retry_after_s))))
