"""What waits of one class, by tenant: how much it is, and who has most."""

from math import inf
from typing import NamedTuple

from vllm_omni_plugin.admission.indexed_heap import IndexedHeap
from vllm_omni_plugin.admission.tenant_accounts import TenantAccount
from vllm_omni_plugin.admission.ticket import Ticket


class Backlog(NamedTuple):
    """So much waits.

    Attributes:
        requests: requests.
        tokens: tokens of their prompts.
    """

    requests: int = 0
    tokens: int = 0


class TenantQueue:
    """What waits of one tenant, in order of arrival. It exists only while something does."""

    __slots__ = ("account", "tickets", "tokens")

    def __init__(self, account: TenantAccount) -> None:
        self.account = account
        self.tickets: dict[int, Ticket] = {}
        self.tokens = 0

    @property
    def load(self) -> float:
        """Tokens for each unit of the tenant's weight."""
        return self.tokens / self.account.settings.weight


class ClassQueue:
    """The waiting requests of one class at one head. Each change is O(log n) amortised, n being the tenants that wait.

    The order in which they start is that of their tickets, and not known here. Changed by the orchestrator's loop;
    attributes may be read, and what changes nothing be asked, from any thread.

    Attributes:
        virtual_time: newcomers are not put before it: the lowest tag of what waits, or, while nothing does, the highest
            of a request that has started. In a single line of requests the two are the same.
        last_came: when its last request came, in monotonic seconds.
        requests: how many wait.
        tokens: of their prompts.
        cost: what they are charged for.
        weight: of the tenants that wait.
        highest_load: that of the tenant with the most tokens per weight.
    """

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.last_came = -inf
        self.requests = self.tokens = 0
        self.cost = self.weight = self.highest_load = 0.0
        self._tenants: dict[str, TenantQueue] = {}
        self._loads: IndexedHeap[TenantQueue] = IndexedHeap()
        self._tags: IndexedHeap[int] = IndexedHeap()
        self._started = 0.0

    @property
    def backlog(self) -> Backlog:
        """What waits."""
        return Backlog(self.requests, self.tokens)

    def backlog_of(self, tenant: str) -> Backlog:
        """What waits of one tenant."""
        queue = self._tenants.get(tenant)
        return Backlog() if queue is None else Backlog(len(queue.tickets), queue.tokens)

    def ahead_of(self, account: TenantAccount, start_tag: float) -> float:
        """How many of the waiting requests would start before one with this tag, about.

        Until the virtual time is at the tag, each tenant that waits gets its weight's part of the tokens; besides, one
        request of each may have begun to be served before.
        """
        if not self.requests:
            return 0.0
        others = len(self._tenants) - (account.name in self._tenants)
        mean_cost = self.cost / self.requests
        fair = others + max(0.0, start_tag - self.virtual_time) * self.weight / mean_cost
        return min(float(self.requests), fair)

    def add(self, ticket: Ticket) -> None:
        """A request begins to wait, the newest of its tenant."""
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
        """A request waits no longer."""
        queue = self._tenants[ticket.tenant.name]
        del queue.tickets[ticket.number]
        self._removed(queue, ticket)

    def remove_newest(self, tenant: str) -> Ticket:
        """The newest request of a tenant waits no longer."""
        queue = self._tenants[tenant]
        # Not the last key: behind many that were deleted it takes long to find.
        _, ticket = queue.tickets.popitem()
        self._removed(queue, ticket)
        return ticket

    def longest(self) -> TenantAccount | None:
        """The tenant with the most tokens per weight; None if nothing waits."""
        first = self._loads.first()
        return None if first is None else first[1].account

    def reweigh(self) -> None:
        """The weights of tenants have changed. O(n)."""
        self.weight = sum(queue.account.settings.weight for queue in self._tenants.values())
        for queue in self._tenants.values():
            self._loads.add(queue, -queue.load)
        self._settle()

    def started(self, ticket: Ticket) -> None:
        """A request has started, which does not wait any more."""
        self._started = max(self._started, ticket.start_tag)
        self._settle()

    def _removed(self, queue: TenantQueue, ticket: Ticket) -> None:
        self._tags.discard(ticket.number)
        queue.tokens -= ticket.tokens
        if not queue.tickets:
            del self._tenants[queue.account.name]
            self.weight -= queue.account.settings.weight
        self._count(-1, queue, ticket)
        if not self._tenants:
            # What rounding has left.
            self.cost = self.weight = 0.0

    def _count(self, sign: int, queue: TenantQueue, ticket: Ticket) -> None:
        self.requests += sign
        self.tokens += sign * ticket.tokens
        self.cost += sign * ticket.cost
        if queue.tickets:
            self._loads.add(queue, -queue.load)
        else:
            self._loads.discard(queue)
        self._settle()

    def _settle(self) -> None:
        # Kept as attributes: asking for the first entry changes the heap, and other threads want to know.
        longest, lowest = self._loads.first(), self._tags.first()
        self.highest_load = 0.0 if longest is None else -longest[0]
        self.virtual_time = self._started if lowest is None else lowest[0]
