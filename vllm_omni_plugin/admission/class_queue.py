"""What waits of one class, by tenant: how much it is, and who has most."""

from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

from vllm_omni_plugin.admission.accounts import TenantAccount
from vllm_omni_plugin.admission.ticket import Ticket

_FEW = 64


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

    __slots__ = ("account", "at_most", "tickets", "tokens")

    def __init__(self, account: TenantAccount) -> None:
        self.account = account
        self.tickets: dict[int, Ticket] = {}
        self.tokens = 0
        # Its latest place in the heap of the class: its load is not above that.
        self.at_most = -1.0

    @property
    def load(self) -> float:
        """Tokens for each unit of the tenant's weight."""
        return self.tokens / self.account.settings.weight


class ClassQueue:
    """The waiting requests of one class at one head. Each change is O(log n) amortised, n being the tenants that wait.

    The order in which they start is that of their tickets, and not known here. Changed by the orchestrator's loop;
    attributes may be read, and what changes nothing be asked, from any thread.

    Attributes:
        virtual_time: highest tag of a request that has started: newcomers are not put before it.
        requests: how many wait.
        tokens: of their prompts.
        cost: what they are charged for.
        weight: of the tenants that wait.
        highest_load: that of the tenant with the most tokens per weight.
    """

    def __init__(self) -> None:
        self.virtual_time = 0.0
        self.requests = self.tokens = 0
        self.cost = self.weight = self.highest_load = 0.0
        self._tenants: dict[str, TenantQueue] = {}
        # Loads, the highest first. A tenant's entry may be higher than its load, never lower; others are out of date.
        self._heap: list[tuple[float, int, TenantQueue]] = []
        self._entries = 0

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
        self._count(1, ticket)
        if queue.load > queue.at_most:
            self._enter(queue)
        self._settle()

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
        return self._heap[0][2].account if self._heap else None

    def reweigh(self) -> None:
        """The weights of tenants have changed. O(n)."""
        self.weight = sum(queue.account.settings.weight for queue in self._tenants.values())
        self._rebuild()
        self._settle()

    def _removed(self, queue: TenantQueue, ticket: Ticket) -> None:
        queue.tokens -= ticket.tokens
        self._count(-1, ticket)
        if not queue.tickets:
            del self._tenants[queue.account.name]
            self.weight -= queue.account.settings.weight
        if not self._tenants:
            # What rounding has left.
            self.cost = self.weight = 0.0
        self._settle()

    def _count(self, sign: int, ticket: Ticket) -> None:
        self.requests += sign
        self.tokens += sign * ticket.tokens
        self.cost += sign * ticket.cost

    def _enter(self, queue: TenantQueue) -> None:
        if len(self._heap) > 2 * len(self._tenants) + _FEW:
            self._rebuild()
        else:
            queue.at_most = queue.load
            heappush(self._heap, self._entry(queue))

    def _entry(self, queue: TenantQueue) -> tuple[float, int, TenantQueue]:
        self._entries += 1
        return (-queue.at_most, self._entries, queue)

    def _rebuild(self) -> None:
        for queue in self._tenants.values():
            queue.at_most = queue.load
        self._heap = [self._entry(queue) for queue in self._tenants.values()]
        heapify(self._heap)

    def _settle(self) -> None:
        """See that the first entry is up to date, and so is that of the tenant with the highest load."""
        heap = self._heap
        while heap:
            load, _, queue = heap[0]
            if not queue.tickets or -load != queue.at_most:
                heappop(heap)
            elif queue.load < queue.at_most:
                queue.at_most = queue.load
                heapreplace(heap, self._entry(queue))
            else:
                break
        self.highest_load = heap[0][2].at_most if heap else 0.0
