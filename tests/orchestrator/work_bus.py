"""Small heads that report their work to each other over a bus, which delivers messages on demand."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from typing import Any, cast

from tests.fakes.engine_api import FakeRequest
from vllm_omni_plugin.balancing import Decision, LeastQueueLengthBalancer, Prompt, Task
from vllm_omni_plugin.coordinator import HeadLeft, HeadWork, ReplicaStatus, ReplicaWork, SessionLost, Welcome
from vllm_omni_plugin.orchestrator import PoolMember, StagePool, StageRun
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolTraits
from vllm_omni_plugin.orchestrator.pool.work_exchange import WorkExchange
from vllm_omni_plugin.replicas.links.engine_client import EngineClient
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize

PROMPT_TOKENS = 100
ADAPTER_SLOTS = 2

Message = HeadWork | HeadLeft | SessionLost | Welcome


class Timers:
    """A clock that is moved by hand, with its timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._cancelled: set[int] = set()

    def call_later(self, seconds: float, function: Callable[[], None]) -> asyncio.TimerHandle:
        number = next(self._order)
        heappush(self._due, (self.now + seconds, number, function))
        return cast(asyncio.TimerHandle, _Handle(partial(self._cancelled.add, number)))

    def advance(self, seconds: float = 0.0) -> None:
        """Let time pass, and run the timers."""
        until = self.now + seconds
        while self._due and self._due[0][0] <= until:
            self.now, number, function = heappop(self._due)
            if number not in self._cancelled:
                function()
        self.now = until


class _Handle:
    def __init__(self, cancel: Callable[[], None]) -> None:
        self.cancel = cancel


class WorkingHead:
    def __init__(self, timers: Timers, report: Callable[[Sequence[ReplicaWork], bool], None]) -> None:
        self.exchange = WorkExchange(report, call_later=timers.call_later)
        self.pool = StagePool(
            0, LeastQueueLengthBalancer(), clock=lambda: timers.now, traits=PoolTraits(exchange=self.exchange)
        )
        self.runs: list[StageRun] = []
        self._number = count()

    def attach(self, replica: int, incarnation: int = 0, remote: bool = True) -> PoolMember:
        known = [member for member in self.pool.members if member.replica_id == replica]
        member = known[0] if known else self.pool.add(replica)
        member.remote, member.incarnation = remote, incarnation
        # Nothing is sent: the pool only asks whether there is a client.
        size = EngineSize(adapters=ADAPTER_SLOTS)
        self.pool.serve(member, cast(EngineClient, object()), f"in-{replica}", f"out-{replica}", size)
        return member

    def lose(self, member: PoolMember) -> None:
        lost = self.pool.lose(member, ReplicaStatus.DOWN)
        self.runs = [run for run in self.runs if run not in lost]

    def charge(self, member: PoolMember, adapter: str = "") -> StageRun:
        run = StageRun("r", cast(Any, FakeRequest("r")), 0.0)
        task: Task = {"prompt": Prompt(range(PROMPT_TOKENS), adapter)}
        run.assign(member.replica_id, f"r-{next(self._number)}", task, Decision(0, "test"), 0.0)
        self.pool.charge(member, run)
        member.ledger.mark_sent(run)
        self.runs.append(run)
        return run

    def begin(self, run: StageRun) -> None:
        assert run.replica_id is not None
        self.pool.add_first_output(self.pool.member(run.replica_id), run, None)

    def release(self, run: StageRun) -> None:
        self.runs.remove(run)
        self.pool.release(run)

    def receive(self, message: Message) -> None:
        others_work = self.exchange.handle(message)
        self.pool.unreported.set_heads(self.exchange.heads)
        for member, work in others_work:
            self.pool.set_others_work(member, work)


class WorkBus:
    """The coordinator's part: relays reports, in order, and announces heads."""

    def __init__(self) -> None:
        self.timers = Timers()
        self.heads: dict[str, WorkingHead] = {}
        self.reports: list[tuple[str, float, list[ReplicaWork], bool]] = []
        self._work: dict[str, dict[int, ReplicaWork]] = {}
        self._inboxes: dict[str, deque[Message]] = {}

    def join(self, head_id: str) -> WorkingHead:
        """A head opens a session, and gets the work of the others."""
        head = self.heads[head_id] = WorkingHead(self.timers, partial(self._report, head_id))
        self._inboxes[head_id] = deque()
        self._welcome(head_id)
        return head

    def leave(self, head_id: str) -> None:
        self.heads.pop(head_id).exchange.close()
        del self._inboxes[head_id]
        self._work.pop(head_id, None)
        for inbox in self._inboxes.values():
            inbox.append(HeadLeft(head_id))

    def cut_off(self, head_id: str, noticed: bool) -> None:
        """A head loses its session with all undelivered messages, and opens it again; the others may have noticed."""
        self._inboxes[head_id].clear()
        self.heads[head_id].receive(SessionLost())
        if noticed:
            self._work.pop(head_id, None)
            for other in self._inboxes.keys() - {head_id}:
                self._inboxes[other].append(HeadLeft(head_id))
        self._welcome(head_id)

    def deliver(self, head_id: str, messages: int = 1) -> None:
        inbox = self._inboxes[head_id]
        for _ in range(min(messages, len(inbox))):
            self.heads[head_id].receive(inbox.popleft())

    def settle(self) -> None:
        """Run all timers and deliver all messages."""
        for _ in range(4):
            self.timers.advance(1.0)
            for head_id, inbox in self._inboxes.items():
                self.deliver(head_id, len(inbox))

    def _report(self, head_id: str, work: Sequence[ReplicaWork], full: bool) -> None:
        self.reports.append((head_id, self.timers.now, list(work), full))
        known = {} if full else self._work.get(head_id, {})
        self._work[head_id] = known | {row.engine: row for row in work}
        for other in self._inboxes.keys() - {head_id}:
            self._inboxes[other].append(HeadWork(head_id, full, list(work)))

    def _welcome(self, head_id: str) -> None:
        others = [other for other in self._inboxes if other != head_id]
        self._inboxes[head_id].append(Welcome(others))
        for other in others:
            if other in self._work:
                self._inboxes[head_id].append(HeadWork(other, True, list(self._work[other].values())))
