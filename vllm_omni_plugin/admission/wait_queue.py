"""Which requests of a head wait, how long they will wait, and which are evicted when the queue is full.

Which request is sent next is decided in `orchestrator.dispatch.next_step`.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, Protocol, Self

from vllm_omni_plugin.admission.admission_config import AdmissionConfig, QueueBounds
from vllm_omni_plugin.admission.class_queue import Backlog, ClassQueue
from vllm_omni_plugin.admission.tenant_accounts import TenantAccount
from vllm_omni_plugin.admission.ticket import Ticket


class StageView(Protocol):
    """What admission reads of the stage. Read from any thread."""

    @property
    def send_rate(self) -> float:
        """Requests per second that leave this head's queue, measured while there is a queue; 0: not known yet."""

    @property
    def unstarted(self) -> int:
        """Requests of this head that engines have and that have no output yet."""

    @property
    def first_output_s(self) -> float:
        """Seconds until the first output in which engines answer almost all requests, measured; 0: not known yet."""

    @property
    def heads(self) -> int:
        """Heads that share the stage's replicas, at least 1."""

    @property
    def other_heads_backlog(self) -> Mapping[str, Backlog]:
        """Waiting requests of all other heads together, by class."""


class _BoundedQueues(NamedTuple):
    """Queues that share bounds: of this head, from the new request's class down; their requests may be evicted.

    `wait_s` is the expected wait of the last request.
    """

    bounds: QueueBounds
    waiting: Backlog
    wait_s: float
    queues: list[ClassQueue]

    def excess(self, tokens: int) -> float:
        """Requests above the bounds once a request of so many tokens is added. A request always fits if it is alone."""
        bounds, (requests, waiting_tokens) = self.bounds, self.waiting
        if not requests:
            return 0.0
        excess = 0.0
        if bounds.max_waiting_requests is not None:
            excess = max(excess, requests + 1 - bounds.max_waiting_requests)
        if bounds.max_waiting_tokens is not None:
            too_many = waiting_tokens + tokens - bounds.max_waiting_tokens
            excess = max(excess, too_many * requests / max(1, waiting_tokens))
        if bounds.max_wait is not None and self.wait_s > bounds.max_wait:
            excess = max(excess, requests * (1 - bounds.max_wait / self.wait_s))
        return excess


class WaitQueue:
    """What waits, by class in the order of a config. Each operation is O(log n) and O(classes).

    It counts only: the order of the requests is that of `WaitingRuns`. Only the orchestrator's loop may change it; any
    thread may call methods that change nothing.
    """

    def __init__(
        self, config: AdmissionConfig, stage: StageView, queues: Mapping[str, ClassQueue] | None = None
    ) -> None:
        """After a reload queues go on by their class's name; removed classes stay, last, while requests wait there."""
        old = queues or {}
        self.config = config
        self._stage = stage
        self._queues = {each.name: old.get(each.name) or ClassQueue() for each in config.classes}
        self._queues |= {name: queue for name, queue in old.items() if name not in self._queues and queue.requests}
        for queue in self._queues.values():
            queue.update_weights()

    def with_config(self, config: AdmissionConfig) -> Self:
        """The same requests with the classes and weights of another config."""
        return type(self)(config, self._stage, self._queues)

    def of(self, class_name: str) -> ClassQueue:
        """The queue of a class; an empty one if the class is in no config any more."""
        return self._queues.get(class_name) or self._queues.setdefault(class_name, ClassQueue())

    def backlog_by_class(self) -> dict[str, Backlog]:
        return {name: queue.backlog for name, queue in list(self._queues.items())}

    def backlog_of(self, tenant: str) -> Backlog:
        return total(queue.backlog_of(tenant) for queue in list(self._queues.values()))

    def ahead_of(self, account: TenantAccount, index: int, start_tag: float) -> float:
        """An estimate of how many waiting requests would start before a request of this class with this tag."""
        queues = list(self._queues.values())
        return sum(queue.requests for queue in queues[:index]) + queues[index].ahead_of(account, start_tag)

    def has_higher_class(self, class_name: str, since: float) -> bool:
        """Whether a request of a class before this one waits, or has arrived after `since`."""
        for name, queue in self._queues.items():
            if name == class_name:
                return False
            if queue.requests or queue.last_arrival > since:
                return True
        return False

    def start_s(self, ahead: float) -> float:
        """Seconds until engines have started so many waiting requests and those they have; 0: rate not known."""
        return self.seconds(ahead + self._stage.unstarted)

    def drain_s(self, excess: float) -> float:
        """Seconds until so many requests have left the queues of all heads; 0: rate not known."""
        return self.seconds(excess / self._stage.heads)

    def seconds(self, requests: float) -> float:
        """Seconds until so many waiting requests have been sent to engines; 0: rate not known."""
        rate = self._stage.send_rate
        return requests / rate if rate else 0.0

    def excess(self, account: TenantAccount, index: int) -> float:
        """Requests above the bounds if a request of this tenant and class came now; 0 if it could wait.

        It can wait also if others would be evicted for it. Its tokens are not known, so it may be refused later.
        """
        for bounded in self._bounded(index):
            excess = bounded.excess(1)
            if excess and not any(queue.requests for queue in bounded.queues[1:]):
                own = bounded.queues[0]
                load = own.backlog_of(account.name).tokens / account.settings.weight
                if not own.requests or load >= own.highest_load:
                    return excess
        return 0.0

    def evict_for(self, ticket: Ticket) -> tuple[list[Ticket], float]:
        """Remove what must go so that this one can wait, and return it and 0; or nothing, and how many are too many."""
        evicted: list[Ticket] = []
        index = self.index_of(ticket.class_name)
        while (full := next((each for each in self._bounded(index) if each.excess(ticket.tokens)), None)) is not None:
            victim = _remove_newest_of_longest(full.queues, ticket)
            if victim is None:
                for each in reversed(evicted):
                    self.of(each.class_name).add(each)
                return [], full.excess(ticket.tokens)
            evicted.append(victim)
        return evicted, 0.0

    def index_of(self, class_name: str) -> int:
        """The index of a class among all queues."""
        self.of(class_name)
        return list(self._queues).index(class_name)

    def _bounded(self, index: int) -> Iterator[_BoundedQueues]:
        """The class at an index, then all classes together.

        Requests of lower classes at other heads do not count: they cannot be evicted from here, and must not keep a
        higher class out.
        """
        config = self.config
        if not (config.any_set or (index < len(config.classes) and config.classes[index].any_set)):
            return
        named = list(self._queues.items())
        others = self._stage.other_heads_backlog
        name, queue = named[index]
        own = total(each.backlog for _, each in named)
        if index < len(config.classes):
            up_to_class = sum(each.requests for _, each in named[: index + 1])
            waiting = total((queue.backlog, others.get(name, Backlog())))
            yield _BoundedQueues(config.classes[index], waiting, self.start_s(up_to_class), [queue])
        lower = {each.name for each in config.classes[index + 1 :]}
        waiting = total((own, *(backlog for each, backlog in others.items() if each not in lower)))
        yield _BoundedQueues(config, waiting, self.start_s(own.requests), [each for _, each in named[index:]])


def total(backlogs: Iterable[Backlog]) -> Backlog:
    requests = tokens = 0
    for backlog in backlogs:
        requests += backlog.requests
        tokens += backlog.tokens
    return Backlog(requests, tokens)


def _remove_newest_of_longest(queues: list[ClassQueue], ticket: Ticket) -> Ticket | None:
    """Remove the newest request of the tenant with the most tokens per weight, in the last class that has requests.

    None if that tenant would be that of the ticket, whose class is the first.
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
