"""The queue of one stage at one head: who may come in, who waits for its replica, and who is sent when it has room."""

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any

from vllm_omni_plugin.admission import Admission, AdmissionPlan, Backlog, Order, Refusal, Terms, Ticket
from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.errors import RefusedError
from vllm_omni_plugin.orchestrator.dispatch.waiting_line import RECALLS, Waiting, WaitingLine
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_flow import StageFlow
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.charges import NO_WORK, Work
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

Choice = tuple[PoolMember, Decision]
"""A replica, and why it is the one."""
Refused = tuple[StageRun, RefusedError]
"""A run that waits no longer, and what its client is told."""

_NO_TERMS = Terms()


class HeadQueue:
    """Requests between the choice of a replica and the send. Lives on the orchestrator's loop; does no I/O.

    A request is charged to the replica that the policy has chosen, and waits here until that one can begin it
    (`Reserve`). The order is that of `Admission`, which also says who is refused; a stage that gets what other stages
    have put out refuses nobody, and its order is that of arrival. What `Admission` wants to know of the stage, it asks
    here.

    Args:
        pool: the stage's replicas.
        plan: who may come in; None: everybody.
        metrics: what it counts.
        clock: monotonic seconds.
        wake_at: asks for a call of `overdue` at this time, in monotonic seconds.

    Attributes:
        admission: the rules; None: everybody may come in.
    """

    def __init__(
        self,
        pool: StagePool,
        plan: AdmissionPlan | None,
        metrics: OrchestratorMetrics,
        clock: Callable[[], float],
        wake_at: Callable[[float], None],
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._wake_at = wake_at
        self._line = WaitingLine(self._yields)
        # Those that no engine has, wherever they wait.
        self._due: Order[StageRun] = Order()
        # Of what waits here alone: while nothing does, requests leave at the rate at which they come.
        self._flow = StageFlow(clock)
        self._by_ticket: dict[int, StageRun] = {}
        self.admission = None if plan is None else Admission(plan, self)

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, run: StageRun) -> bool:
        return run in self._line

    @property
    def rate(self) -> float:
        """See `StageState`."""
        return self._flow.leaving_rate or 0.0

    @property
    def unbegun(self) -> int:
        """See `StageState`."""
        return max(0, self._pool.flow.queued - len(self._line))

    @property
    def heads(self) -> int:
        """See `StageState`."""
        return self._pool.heads

    @property
    def others_waiting(self) -> Mapping[str, Backlog]:
        """See `StageState`."""
        exchange = self._pool.exchange
        if exchange is None or self.admission is None:
            return {}
        return {each.name: Backlog(*exchange.others_waiting(each.name)) for each in self.admission.plan.classes}

    def enter(self, run: StageRun, request: Any, prompt_tokens: int) -> None:
        """A request has come, or comes again, with so many tokens of prompt.

        Raises:
            RefusedError: its tenant is at a limit.
        """
        if self.admission is None or run.ticket is not None:
            return
        # Requests of a Python stage have none.
        priority = getattr(request, "priority", 0)
        ticket = self.admission.ticket(run.terms or _NO_TERMS, priority, prompt_tokens, self._clock())
        if isinstance(ticket, Refusal):
            raise self._refused(ticket)
        run.ticket = ticket
        self.must_start(run)

    def must_start(self, run: StageRun) -> None:
        """A run is at no engine, or not any more: if nothing of it has come, it is refused at its deadline."""
        if run.ticket is not None and run.ticket.due is not None and not run.produced:
            self._due.add(run, run.ticket.due)
            self._wake_at(run.ticket.due)

    def must_wait(self, member: PoolMember, run: StageRun) -> bool:
        """Whether a run that is charged to a replica cannot be sent yet."""
        reserve = self._pool.reserve
        # A suspect has its replica for itself.
        if not reserve.waits or run.suspicions:
            return False
        return self._line.is_behind(run, member, _place(run)) or not self._has_room(run, member, run.prefill_tokens)

    def wait(self, run: StageRun, member: PoolMember, request: Any) -> list[Refused]:
        """A run waits for the replica that it is charged to. Returns who is refused for that, perhaps itself alone."""
        pushed_out: list[Refused] = []
        if self.admission is not None and run.ticket is not None:
            outcome = self.admission.wait(run.ticket, self._clock())
            if isinstance(outcome, Refusal):
                return [(run, self._refused(outcome))]
            pushed_out = [(self._by_ticket.pop(ticket.number), self._refused(refusal)) for ticket, refusal in outcome]
            self._by_ticket[run.ticket.number] = run
            self._tell_others(run.ticket.class_name)
        self._line.add(run, Waiting(member, request, _place(run)), recallable=run.affinity_key is None)
        self._flow.sent(self._clock())
        return pushed_out

    def started(self, run: StageRun) -> None:
        """An engine has got a run."""
        if self.admission is not None and run.ticket is not None:
            self._due.discard(run)
            self.admission.started(run.ticket)
            self._waits_no_longer(run.ticket)

    def leave(self, run: StageRun) -> None:
        """A run is no longer charged to the replica it waits for, if it does. It keeps its place in the order."""
        if self._line.take(run) is not None:
            self._flow.dropped(self._clock())

    def ended(self, run: StageRun) -> None:
        """A run is over, in whatever way. Idempotent."""
        self.leave(run)
        if self.admission is not None and run.ticket is not None:
            self._due.discard(run)
            self.admission.ended(run.ticket, len(run.produced), self._clock())
            self._waits_no_longer(run.ticket)

    def overdue(self) -> Iterator[Refused]:
        """Those that should have started by now; each is to be ended at once."""
        while (first := self._due.first()) is not None:
            due, run = first
            if due > self._clock():
                self._wake_at(due)
                return
            assert self.admission is not None
            assert run.ticket is not None
            self._due.discard(run)
            yield run, self._refused(self.admission.overdue(run.ticket, self._clock()))

    def ready(
        self, member: PoolMember, avoids: Callable[[StageRun, PoolMember], bool]
    ) -> Iterator[tuple[StageRun, Any]]:
        """Take those that wait for a replica, as far as it has room: each with what is to be sent, and at once.

        Args:
            member: the replica.
            avoids: whether a run does not go there now.
        """

        def may_go(run: StageRun) -> bool:
            return self._has_room(run, member, run.prefill_tokens) and not avoids(run, member)

        idle = not member.account.unbegun
        for run, waiting in self._line.ready(member, may_go):
            # One that leaves room for others comes when none is there, on purpose.
            self._metrics.bubbles += idle and not self._yields(run)
            idle = False
            self._flow.began(self._clock(), 0, None)
            yield run, waiting.request

    def recalls(
        self, member: PoolMember, avoided: Callable[[StageRun], Collection[int]]
    ) -> Iterator[tuple[StageRun, Choice]]:
        """A replica may have more room than is asked for: those that wait for others, and where they would go now.

        Args:
            member: the replica.
            avoided: ids of replicas to which a run does not go.
        """
        if not self._pool.reserve.recalls or self._line.first_of(member) is not None:
            return
        for run in self._line.to_recall(self._clock(), RECALLS):
            # The one before may have found that it is dead.
            if member.status is not ReplicaStatus.UP or not self._has_room(run, member, run.prefill_tokens):
                return
            assert run.replica_id is not None
            charged_to = self._pool.member(run.replica_id)
            other, decision = self._pool.decide_again(charged_to, run, avoided(run))
            may_begin = self._has_room(run, other, run.prompt_tokens - decision.matched_tokens)
            if other is not charged_to and may_begin and self._line.first_of(other) is None:
                self._metrics.recalls += 1
                yield run, (other, decision)

    def waiting_for(self, member: PoolMember) -> list[StageRun]:
        """All that wait for a replica, in order."""
        return self._line.of(member)

    def _has_room(self, run: StageRun, member: PoolMember, prefill_tokens: int) -> bool:
        return self._pool.reserve.has_room(member.account, prefill_tokens, self._yields(run))

    def _yields(self, run: StageRun) -> bool:
        admission, ticket = self.admission, run.ticket
        return admission is not None and ticket is not None and admission.yields(ticket, self._clock())

    def _waits_no_longer(self, ticket: Ticket) -> None:
        if self._by_ticket.pop(ticket.number, None) is not None:
            self._tell_others(ticket.class_name)

    def _tell_others(self, class_name: str) -> None:
        if self._pool.exchange is not None:
            self._pool.exchange.tell_waiting(class_name, partial(self._waiting_of, class_name))

    def _waiting_of(self, class_name: str) -> Work:
        assert self.admission is not None
        return Work(*self.admission.by_class().get(class_name, NO_WORK))

    def _refused(self, refusal: Refusal) -> RefusedError:
        return RefusedError(refusal.status, refusal.reason, refusal.message, refusal.retry_after_s)


def _place(run: StageRun) -> Any:
    """Its place in the order of all that wait."""
    return run.ticket if run.ticket is not None else run.submitted_at
