"""The queue of one stage at one head: who may come in, who waits for its replica, and who is sent when it has room."""

from collections.abc import Callable, Collection, Iterator
from typing import Any

from vllm_omni_plugin.admission import IndexedHeap, Ticket
from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.errors import RequestRefusedError
from vllm_omni_plugin.orchestrator.dispatch.admission_gate import AdmissionGate, RefuseRun
from vllm_omni_plugin.orchestrator.dispatch.prefill_free_replicas import PrefillFreeReplicas
from vllm_omni_plugin.orchestrator.dispatch.unsent_queue import RECALLS, UnsentQueue, UnsentRun
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

Choice = tuple[PoolMember, Decision]
"""A replica, and why it is the one."""
ROOM = "room"
"""The reason where a request of somebody under the share goes where room was left for such, and no policy is asked."""
ANYWHERE = Decision(0, ROOM, by_policy=False)
Refused = tuple[StageRun, RequestRefusedError]
"""A run that waits no longer, and what its client is told."""


class HeadQueue:
    """Requests between the choice of a replica and the send. Lives on the orchestrator's loop; does no I/O.

    A request is charged to the replica that the policy has chosen, and waits here until that one can begin it
    (`SendWindow`). The order is that of the tickets; who is refused while no engine has begun it, `AdmissionGate` says.

    Args:
        pool: the stage's replicas.
        gate: where requests have come in.
        metrics: what it counts.
        clock: monotonic seconds.
        wake_at: asks for a call of `overdue` at this time, in monotonic seconds.
    """

    def __init__(
        self,
        pool: StagePool,
        gate: AdmissionGate,
        metrics: OrchestratorMetrics,
        clock: Callable[[], float],
        wake_at: Callable[[float], None],
    ) -> None:
        self._pool = pool
        self._gate = gate
        self._metrics = metrics
        self._clock = clock
        self._wake_at = wake_at
        self._line = UnsentQueue(self._leaves_headroom)
        self._clear = PrefillFreeReplicas(pool.send_window, clock)
        # Those that no engine has, wherever they wait.
        self._due: IndexedHeap[StageRun] = IndexedHeap()

    def __len__(self) -> int:
        return len(self._line)

    def __contains__(self, run: StageRun) -> bool:
        return run in self._line

    def must_start(self, run: StageRun) -> None:
        """A run is at no engine, or not any more: if nothing of it has come, it is refused when it is due.

        One that an engine had has until its deadline, lest it is refused for the time that it has lost with that one.
        """
        ticket = _ticket(run)
        due = ticket.dispatch_by if run.dispatched_at is None else ticket.deadline
        if due is not None and not run.produced:
            self._due.add(run, due)
            self._wake_at(due)

    def soonest(self, run: StageRun, choice: Choice, avoided: Collection[int]) -> Choice:
        """Where a new request goes for which the policy has made this choice.

        That, unless others wait that leave room for it: then any replica may be in the middle of their prompts, and it
        goes where the fewest tokens of prompts are before its own.

        Args:
            run: the request's.
            choice: the policy's.
            avoided: ids of replicas to which it does not go.
        """
        send_window = self._pool.send_window
        is_free = send_window.recalls and not run.crash_losses and run.affinity_key is None
        if (
            not (is_free and self._line.any_leaves_headroom)
            or choice[1].matched_tokens > send_window.short_prefill_tokens
        ):
            return choice
        if self._leaves_headroom(run):
            return choice
        looked = (choice[0], *self._clear.next_group(self._pool.serving))
        free = (m for m in looked if m.replica_id not in avoided and send_window.has_free_slot(m.ledger))
        ready = (m for m in free if self._may_begin(run, m, ANYWHERE))
        # The first of equals, which is the policy's.
        soonest = min(ready, key=lambda member: member.ledger.prefill_tokens_ahead, default=choice[0])
        return choice if soonest is choice[0] else (soonest, ANYWHERE)

    def must_wait(self, member: PoolMember, run: StageRun) -> bool:
        """Whether a run that is charged to a replica cannot be sent yet."""
        send_window = self._pool.send_window
        # A suspect has its replica for itself.
        if not send_window.limited or run.crash_losses:
            return False
        return self._line.is_behind(run, member, _ticket(run)) or not self._has_room(run, member, run.prefill_tokens)

    def wait(self, run: StageRun, member: PoolMember, request: Any, turn_away: RefuseRun) -> None:
        """A run waits for the replica that it is charged to.

        Raises:
            RequestRefusedError: its request may not wait.
        """
        ticket = _ticket(run)
        self._gate.wait(run, ticket, turn_away)
        self._line.add(run, UnsentRun(member, request, ticket), recallable=run.affinity_key is None)

    def started(self, run: StageRun) -> None:
        """An engine has got a run."""
        self._due.discard(run)
        self._gate.started(_ticket(run))

    def leave(self, run: StageRun) -> None:
        """A run is no longer charged to the replica it waits for, if it does. It keeps its place in the order."""
        self._line.take(run)

    def ended(self, run: StageRun) -> None:
        """A run is over, in whatever way. Idempotent."""
        self._line.take(run)
        self._due.discard(run)
        self._gate.leave(_ticket(run))

    def overdue(self) -> Iterator[Refused]:
        """Those that an engine should have got by now; each is to be ended at once."""
        while (first := self._due.first()) is not None:
            due, run = first
            if due > self._clock():
                self._wake_at(due)
                return
            self._due.discard(run)
            yield run, self._gate.overdue(_ticket(run))

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

        idle = not member.ledger.pending
        for run, waiting in self._line.ready(member, may_go):
            # One that leaves room for others comes when none is there, on purpose.
            self._metrics.bubbles += idle and not self._leaves_headroom(run)
            idle = False
            yield run, waiting.request

    def has_own(self, member: PoolMember) -> bool:
        """Whether the first that waits for a replica need not leave room for others."""
        first = self._line.first_of(member)
        return first is not None and not self._leaves_headroom(first)

    def recalls(
        self, member: PoolMember, avoided: Callable[[StageRun], Collection[int]]
    ) -> Iterator[tuple[StageRun, Choice]]:
        """A replica may have more room than is asked for: those that wait for others, and where they would go now.

        Args:
            member: the replica.
            avoided: ids of replicas to which a run does not go.
        """
        if not self._pool.send_window.recalls:
            return
        # Those that wait for it go before others that leave room as well.
        nobody_waits = self._line.first_of(member) is None
        for run in self._line.to_recall(self._clock(), RECALLS, yielding=nobody_waits):
            # The one before may have found that it is dead.
            if member.status is not ReplicaStatus.UP or not self._has_room(run, member, run.prefill_tokens):
                return
            assert run.replica_id is not None
            charged_to = self._pool.member(run.replica_id)
            avoids = avoided(run)
            other, decision = self._pool.decide_again(charged_to, run, avoids)
            overtakes = self._line.any_leaves_headroom and not self._leaves_headroom(run)
            computes_more = run.prompt_tokens - decision.matched_tokens > run.prefill_tokens
            if computes_more and other.ledger.prefill_tokens and not overtakes:
                # It would start earlier, and all that wait for a prompt later.
                continue
            waits = not self._may_begin(run, other, decision)
            soon_computed = decision.matched_tokens <= self._pool.send_window.short_prefill_tokens
            if waits and overtakes and soon_computed and member.replica_id not in avoids:
                # The policy goes by work that this one overtakes.
                other, decision = member, ANYWHERE
            if other is not charged_to and self._may_begin(run, other, decision):
                self._metrics.recalls += 1
                yield run, (other, decision)

    def waiting_for(self, member: PoolMember) -> list[StageRun]:
        """All that wait for a replica, in order."""
        return self._line.of(member)

    def _may_begin(self, run: StageRun, member: PoolMember, decision: Decision) -> bool:
        tokens = run.prompt_tokens - decision.matched_tokens
        return self._has_room(run, member, tokens) and not self._line.is_behind(run, member, _ticket(run))

    def _has_room(self, run: StageRun, member: PoolMember, prefill_tokens: int) -> bool:
        ledger, leaves_headroom = member.ledger, self._leaves_headroom(run)
        newest = ledger.newest_pending if leaves_headroom else None
        behind_in_share = newest is not None and not self._leaves_headroom(newest)
        if not self._pool.send_window.has_room(ledger, prefill_tokens, leaves_headroom, behind_in_share):
            return False
        return not (leaves_headroom and self._clear.must_stay_free(member, self._pool.serving))

    def _leaves_headroom(self, run: StageRun) -> bool:
        return self._gate.admission.leaves_headroom(_ticket(run), self._clock())


def _ticket(run: StageRun) -> Ticket:
    assert run.ticket is not None
    return run.ticket
