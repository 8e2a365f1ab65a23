"""The waiting requests of one class, by tenant: how many there are, and which tenant has most."""

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

from vllm_omni_plugin.admission.indexed_heap import IndexedHeap
from vllm_omni_plugin.admission.tenant_accounts import TenantAccount
from vllm_omni_plugin.admission.ticket import Ticket


class Backlog(NamedTuple):
    """Waiting requests and the tokens of their prompts."""

    requests: int = 0
    tokens: int = 0


@dataclass(slots=True, eq=False)
class TenantQueue:
    """The waiting requests of one tenant and class, in order of arrival. Exists only while there are any."""

    account: TenantAccount
    tickets: dict[int, Ticket] = field(default_factory=dict)
    tokens: int = 0

    @property
    def load(self) -> float:
        """Tokens per unit of the tenant's weight."""
        return self.tokens / self.account.settings.weight


class ClassQueue:
    """The waiting requests of one class at one head. Each change is O(log n) amortised, n being the waiting tenants.

    The requests start in the order of their tickets, which this class does not keep. Only the orchestrator's loop may
    change it; any thread may read attributes and call methods that change nothing.

    `virtual_time` is the earliest start tag of a new request: the lowest tag of the waiting requests or, if none wait,
    the highest tag of a request that has started. In a single queue of requests the two are the same. `last_arrival` is
    in monotonic seconds; `tokens` are of prompts; `weight` is that of the waiting tenants together, `highest_load` that
    of the tenant with the most tokens per weight.
    """

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.last_arrival = -inf
        self.requests = self.tokens = 0
        self.cost = self.weight = self.highest_load = 0.0
        self._tenants: dict[str, TenantQueue] = {}
        self._loads: IndexedHeap[TenantQueue] = IndexedHeap()
        self._tags: IndexedHeap[int] = IndexedHeap()
        self._highest_started_tag = 0.0

    @property
    def backlog(self) -> Backlog:
        return Backlog(self.requests, self.tokens)

    def backlog_of(self, tenant: str) -> Backlog:
        queue = self._tenants.get(tenant)
        return Backlog() if queue is None else Backlog(len(queue.tickets), queue.tokens)

    def ahead_of(self, account: TenantAccount, start_tag: float) -> float:
        """An estimate of how many waiting requests would start before a request with this tag.

        Until the virtual time reaches the tag, each waiting tenant gets tokens by its weight; in addition, one request
        of each other tenant may already be at its turn.
        """
        if not self.requests:
            return 0.0
        others = len(self._tenants) - (account.name in self._tenants)
        mean_cost = self.cost / self.requests
        fair = others + max(0.0, start_tag - self.virtual_time) * self.weight / mean_cost
        return min(float(self.requests), fair)

    def add(self, ticket: Ticket) -> None:
        """Add a request as the newest of its tenant."""
        account = ticket.tenant
        queue = self._tenants.get(account.name)
        if queue is None:
            queue = self._tenants[account.name] = TenantQueue(account)
            self.weight += account.settings.weight
        queue.tickets[ticket.number] = ticket
        queue.tokens += ticket.tokens
        self._tags.add(ticket.number, ticket.start_tag)
        self._count(1, queue, ticket)

    def remove(self, ticket: Ticket) -> None:
        queue = self._tenants[ticket.tenant.name]
        del queue.tickets[ticket.number]
        self._removed(queue, ticket)

    def remove_newest(self, tenant: str) -> Ticket:
        """Remove the newest request of a tenant."""
        queue = self._tenants[tenant]
        # popitem() instead of the last key, which takes long to find behind many deleted keys.
        _, ticket = queue.tickets.popitem()
        self._removed(queue, ticket)
        return ticket

    def longest(self) -> TenantAccount | None:
        """The tenant with the most tokens per weight; None if no request waits."""
        first = self._loads.first()
        return None if first is None else first[1].account

    def update_weights(self) -> None:
        """Call this after the weights of tenants have changed. O(n)."""
        self.weight = sum(queue.account.settings.weight for queue in self._tenants.values())
        for queue in self._tenants.values():
            self._loads.add(queue, -queue.load)
        self._update_extremes()

    def started(self, ticket: Ticket) -> None:
        """A request that does not wait any more has started."""
        self._highest_started_tag = max(self._highest_started_tag, ticket.start_tag)
        self._update_extremes()

    def _removed(self, queue: TenantQueue, ticket: Ticket) -> None:
        self._tags.discard(ticket.number)
        queue.tokens -= ticket.tokens
        if not queue.tickets:
            del self._tenants[queue.account.name]
            self.weight -= queue.account.settings.weight
        self._count(-1, queue, ticket)
        if not self._tenants:
            # Clear rounding errors.
            self.cost = self.weight = 0.0

    def _count(self, sign: int, queue: TenantQueue, ticket: Ticket) -> None:
        self.requests += sign
        self.tokens += sign * ticket.tokens
        self.cost += sign * ticket.cost
        if queue.tickets:
            self._loads.add(queue, -queue.load)
        else:
            self._loads.discard(queue)
        self._update_extremes()

    def _update_extremes(self) -> None:
        # Kept as attributes because other threads read them, and `first` changes the heap.
        longest, lowest = self._loads.first(), self._tags.first()
        self.highest_load = 0.0 if longest is None else -longest[0]
        self.virtual_time = self._highest_started_tag if lowest is None else lowest[0]
