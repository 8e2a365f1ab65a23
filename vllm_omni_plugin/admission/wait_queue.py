"""The queues of all classes: how long they are, how long that lasts, and what must go when they are full."""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol, Self

from vllm_omni_plugin.admission.admission_config import AdmissionConfig, QueueBounds
from vllm_omni_plugin.admission.class_queue import Backlog, ClassQueue
from vllm_omni_plugin.admission.tenant_accounts import TenantAccount
from vllm_omni_plugin.admission.ticket import Ticket


class StageView(Protocol):
    """What admission asks of the stage. Read from any thread."""

    @property
    def dispatch_rate(self) -> float:
        """Requests per second that leave this head's queue, as measured while there is one; 0: not known yet."""

    @property
    def unstarted(self) -> int:
        """Requests of this head that are at engines and have no output yet."""

    @property
    def first_output_s(self) -> float:
        """Seconds within which engines begin to answer almost all that they get, as measured; 0: not known yet."""

    @property
    def heads(self) -> int:
        """Heads that share the stage's replicas, at least 1."""

    @property
    def other_heads_backlog(self) -> Mapping[str, Backlog]:
        """What waits at the other heads, by class: their `Admission.backlog_by_class`, summed up."""


class _Room(NamedTuple):
    """One class, or all of them: what is there, and how much may be."""

    bounds: QueueBounds
    waiting: Backlog
    wait_s: float
    queues: list[ClassQueue]

    def excess(self, tokens: int) -> float:
        """How many requests are too many with one of so many tokens more; 0 if it fits. One alone always does."""
        bounds, (requests, waiting_tokens) = self.bounds, self.waiting
        if not requests:
            return 0.0
        over = 0.0
        if bounds.max_waiting_requests is not None:
            over = max(over, requests + 1 - bounds.max_waiting_requests)
        if bounds.max_waiting_tokens is not None:
            over = max(over, (waiting_tokens + tokens - bounds.max_waiting_tokens) * requests / max(1, waiting_tokens))
        if bounds.max_wait is not None and self.wait_s > bounds.max_wait:
            over = max(over, requests * (1 - bounds.max_wait / self.wait_s))
        return over


class WaitQueue:
    """One `ClassQueue` for each class of a plan, in order. Operations cost O(log n) and O(classes).

    Changed by the orchestrator's loop; what changes nothing may be asked from any thread.

    Attributes:
        plan: whose classes these are.
    """

    def __init__(self, plan: AdmissionConfig, stage: StageView, queues: Mapping[str, ClassQueue] | None = None) -> None:
        old = queues or {}
        self.plan = plan
        self._stage = stage
        self._queues = {each.name: old.get(each.name) or ClassQueue() for each in plan.classes}
        # Behind those of the plan: classes that an earlier one had, until nothing waits there.
        self._queues |= {name: queue for name, queue in old.items() if name not in self._queues and queue.requests}
        for queue in self._queues.values():
            queue.reweigh()

    def under(self, plan: AdmissionConfig) -> Self:
        """The same queues with the classes and weights of another plan."""
        return type(self)(plan, self._stage, self._queues)

    def of(self, class_name: str) -> ClassQueue:
        """The queue of a class; of one that no plan has any more, an empty one."""
        return self._queues.get(class_name) or self._queues.setdefault(class_name, ClassQueue())

    def by_class(self) -> dict[str, Backlog]:
        """What waits of each class, in order."""
        return {name: queue.backlog for name, queue in list(self._queues.items())}

    def backlog_of(self, tenant: str) -> Backlog:
        """What waits of one tenant."""
        return total(queue.backlog_of(tenant) for queue in list(self._queues.values()))

    def ahead_of(self, account: TenantAccount, index: int, start_tag: float) -> float:
        """How many of the waiting requests would start before one of this class with this tag, about."""
        queues = list(self._queues.values())
        return sum(queue.requests for queue in queues[:index]) + queues[index].ahead_of(account, start_tag)

    def is_above(self, class_name: str, since: float) -> bool:
        """Whether a request of a class before this one waits, or has come since then."""
        for name, queue in self._queues.items():
            if name == class_name:
                return False
            if queue.requests or queue.last_came > since:
                return True
        return False

    def wait_s(self, ahead: float) -> float:
        """Seconds until so many waiting requests have started, after those at engines; 0 while no rate is known."""
        rate = self._stage.dispatch_rate
        return (ahead + self._stage.unstarted) / rate if rate else 0.0

    def sent_in(self, ahead: float) -> float:
        """Seconds until an engine gets a request that so many waiting ones are before; 0 while no rate is known."""
        rate = self._stage.dispatch_rate
        return ahead / rate if rate else 0.0

    def drained_in(self, excess: float) -> float:
        """Seconds until so many requests have left the queues of all heads; 0 while no rate is known."""
        rate = self._stage.dispatch_rate * self._stage.heads
        return excess / rate if rate else 0.0

    def excess(self, account: TenantAccount, index: int) -> float:
        """How many requests would be too many if one of this tenant and class came now; 0 if it found room.

        Its tokens are not known, so some that this lets pass find no room. It finds room where others can be pushed
        out.
        """
        for room in self._rooms(index):
            excess = room.excess(1)
            if excess and not any(queue.requests for queue in room.queues[1:]):
                own = room.queues[0]
                load = own.backlog_of(account.name).tokens / account.settings.weight
                if not own.requests or load >= own.highest_load:
                    return excess
        return 0.0

    def make_room(self, ticket: Ticket) -> tuple[list[Ticket], float]:
        """Take out what must go so that one more can wait.

        Returns:
            What was taken out and 0, or nothing and how many requests are too many: then there is no room for it.
        """
        taken: list[Ticket] = []
        index = self.place_of(ticket.class_name)
        while (full := self._first_full(index, ticket.tokens)) is not None:
            room, excess = full
            victim = _newest_of_longest(room.queues, ticket)
            if victim is None:
                for each in reversed(taken):
                    self.of(each.class_name).add(each)
                return [], excess
            taken.append(victim)
        return taken, 0.0

    def place_of(self, class_name: str) -> int:
        """The place of a class among all that there are."""
        self.of(class_name)
        return list(self._queues).index(class_name)

    def _first_full(self, index: int, tokens: int) -> tuple[_Room, float] | None:
        for room in self._rooms(index):
            if excess := room.excess(tokens):
                return room, excess
        return None

    def _rooms(self, index: int) -> Iterator[_Room]:
        """The class at a place, and all classes together.

        What lower classes have waiting at other heads does not count: it cannot be pushed out from here, and must not
        keep a higher class out.
        """
        plan = self.plan
        if not (plan.any_set or (index < len(plan.classes) and plan.classes[index].any_set)):
            return
        named = list(self._queues.items())
        others = self._stage.other_heads_backlog
        name, queue = named[index]
        own = total(each.backlog for _, each in named)
        if index < len(plan.classes):
            above = sum(each.requests for _, each in named[: index + 1])
            waiting = total((queue.backlog, others.get(name, Backlog())))
            yield _Room(plan.classes[index], waiting, self.wait_s(above), [queue])
        lower = {each.name for each in plan.classes[index + 1 :]}
        waiting = total((own, *(backlog for each, backlog in others.items() if each not in lower)))
        yield _Room(plan, waiting, self.wait_s(own.requests), [each for _, each in named[index:]])


def total(backlogs: Iterable[Backlog]) -> Backlog:
    """All of them together."""
    requests = tokens = 0
    for backlog in backlogs:
        requests += backlog.requests
        tokens += backlog.tokens
    return Backlog(requests, tokens)


def _newest_of_longest(queues: list[ClassQueue], ticket: Ticket) -> Ticket | None:
    """Take out the newest request of the tenant with the most tokens per weight, in the last class with one.

    Returns:
        None if that would be the ticket, whose class is the first.
    """
    for queue in reversed(queues):
        longest = queue.longest()
        if longest is None:
            continue
        if queue is queues[0]:
            account = ticket.tenant
            load = (queue.backlog_of(account.name).tokens + ticket.tokens) / account.settings.weight
            if load >= queue.highest_load:
                return None
        return queue.remove_newest(longest.name)
    return None
