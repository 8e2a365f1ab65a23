"""The queue of one stage at one head: which runs wait for their replica, and which run is sent when it has room."""

from collections.abc import Callable, Collection, Iterator
from math import inf
from typing import Any

from vllm_omni_plugin.admission import HeadroomSize, IndexedHeap, Ticket
from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.errors import RequestRefusedError
from vllm_omni_plugin.orchestrator.dispatch.admission_gate import AdmissionGate, EvictRun
from vllm_omni_plugin.orchestrator.dispatch.headroom import Headroom
from vllm_omni_plugin.orchestrator.dispatch.unsent_queue import RECALLS, UnsentQueue, UnsentRun
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.send_window import short_prefill_tokens
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.counters import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

Choice = tuple[PoolMember, Decision]
"""A replica, and why it was chosen."""
HEADROOM_REASON = "room"
"""The reason of a decision that uses headroom instead of the policy."""
HEADROOM_DECISION = Decision(0, HEADROOM_REASON, by_policy=False)


class HeadQueue:
    """Runs between the choice of a replica and the send. Lives on the orchestrator's loop; does no I/O.

    A run is charged to the replica that the policy chose, and waits here until the replica has room (`SendWindow`). The
    order is that of the tickets. `AdmissionGate` decides which waiting requests are refused.

    Only runs with a ticket come here. Without admission control no run has one, and `gate` is None.

    Args:
        wake_at: asks for a call of `take_expired` at this time, in monotonic seconds.

    Attributes:
        unsent: the waiting runs.
    """

    def __init__(
        self,
        pool: StagePool,
        gate: AdmissionGate | None,
        metrics: OrchestratorMetrics,
        clock: Callable[[], float],
        wake_at: Callable[[float], None],
    ) -> None:
        self._pool = pool
        self._admission_gate = gate
        self._metrics = metrics
        self._clock = clock
        self._wake_at = wake_at
        self.unsent = UnsentQueue(self._is_over_share)
        self._headroom = Headroom(pool, pool.send_window, self._is_over_share, self._headroom_size, clock)
        # Runs that no engine has, wherever they wait, by their deadlines.
        self._deadlines: IndexedHeap[StageRun] = IndexedHeap()

    def watch_deadline(self, run: StageRun) -> None:
        """No engine has this run, or not any more: it expires at its deadline, unless it has delivered something.

        If an engine had the run, it has until the deadline of its first token: the time lost there is not its fault.
        """
        ticket = _ticket(run)
        expires_at = ticket.send_by if run.first_sent_at is None else ticket.deadline
        if expires_at < inf and not run.produced:
            self._deadlines.add(run, expires_at)
            self._wake_at(expires_at)

    def prefer_headroom(self, run: StageRun, choice: Choice, avoided: Collection[int]) -> Choice:
        """The replica for a new request, given the policy's choice.

        While over-share runs wait, any replica may be in the middle of their prefills. A request within its share then
        goes to a replica with few prompt tokens ahead of it, unless the policy's replica has much of its prompt cached.

        Args:
            avoided: ids of replicas to which the request does not go.
        """
        is_bound = run.crash_losses or run.affinity_key is not None
        if not self._pool.send_window.recalls or is_bound or not self.unsent.has_over_share:
            return choice
        if choice[1].matched_tokens > short_prefill_tokens(choice[0].ledger) or self._is_over_share(run):
            return choice

        def may_start(member: PoolMember) -> bool:
            return member.replica_id not in avoided and self._may_start(run, member, HEADROOM_DECISION)

        best = self._headroom.least_loaded(choice[0], may_start)
        return choice if best is choice[0] else (best, HEADROOM_DECISION)

    def must_wait(self, member: PoolMember, run: StageRun) -> bool:
        """Whether a run that is charged to a replica cannot be sent yet."""
        # A suspect has its replica for itself.
        if not self._pool.send_window.limited or run.crash_losses:
            return False
        is_behind = self.unsent.is_behind(run, member, _ticket(run))
        return is_behind or not self._headroom.has_room(run, member, run.prefill_tokens)

    def enqueue(self, run: StageRun, member: PoolMember, request: Any, evict: EvictRun) -> None:
        """Let a run wait for the replica that it is charged to.

        Raises:
            RequestRefusedError: the request may not wait.
        """
        ticket = _ticket(run)
        self._gate.enqueue(run, ticket, evict)
        self.unsent.add(run, UnsentRun(member, request, ticket), recallable=run.affinity_key is None)

    def mark_sent(self, run: StageRun) -> None:
        self._deadlines.discard(run)
        self._gate.started(_ticket(run))

    def run_ended(self, run: StageRun) -> None:
        """A run has ended, also because its client hung up: it leaves all queues. Amortised O(log n). Idempotent."""
        self.unsent.remove(run)
        self._deadlines.discard(run)
        self._gate.dequeue(_ticket(run))

    def take_expired(self) -> Iterator[tuple[StageRun, RequestRefusedError]]:
        """The runs whose deadline has passed, and the errors for their clients. Each must be ended at once."""
        while (first := self._deadlines.first()) is not None:
            expires_at, run = first
            if expires_at > self._clock():
                self._wake_at(expires_at)
                return
            self._deadlines.discard(run)
            yield run, self._gate.expire(_ticket(run))

    def take_sendable(
        self, member: PoolMember, avoids: Callable[[StageRun, PoolMember], bool]
    ) -> Iterator[tuple[StageRun, Any]]:
        """Remove the runs that a replica has room for, each with its request. Each must be sent at once.

        Args:
            avoids: whether a run does not go to the replica now.
        """

        def may_send(run: StageRun) -> bool:
            return self._headroom.has_room(run, member, run.prefill_tokens) and not avoids(run, member)

        idle = not member.ledger.pending
        for run, unsent in self.unsent.take_sendable(member, may_send):
            # Over-share runs are sent to idle replicas on purpose.
            self._metrics.reserve_bubbles += idle and not self._is_over_share(run)
            idle = False
            yield run, unsent.request

    def next_is_in_share(self, member: PoolMember) -> bool:
        """Whether the first run that waits for a replica is within its share."""
        first = self.unsent.first_of(member)
        return first is not None and not self._is_over_share(first)

    def find_recalls(
        self, member: PoolMember, avoided: Callable[[StageRun], Collection[int]]
    ) -> Iterator[tuple[StageRun, Choice]]:
        """Runs that wait for other replicas and should go elsewhere now, since a replica may have room for them.

        Args:
            avoided: ids of replicas to which a run does not go.
        """
        if not self._pool.send_window.recalls:
            return
        # The replica's own over-share runs go before those of other replicas.
        nothing_waits = self.unsent.first_of(member) is None
        for run in self.unsent.next_recalls(self._clock(), RECALLS, over_share=nothing_waits):
            if member.status is not ReplicaStatus.UP or not self._headroom.has_room(run, member, run.prefill_tokens):
                return
            assert run.replica_id is not None
            charged_to = self._pool.member(run.replica_id)
            avoided_ids = avoided(run)
            other, decision = self._pool.decide_again(charged_to, run, avoided_ids)
            overtakes = self.unsent.has_over_share and not self._is_over_share(run)
            computes_more = run.prompt_tokens - decision.matched_tokens > run.prefill_tokens
            if computes_more and other.ledger.prefill_tokens and not overtakes:
                # This run would start earlier, but all other prompts there later.
                continue
            waits = not self._may_start(run, other, decision)
            is_short = decision.matched_tokens <= short_prefill_tokens(member.ledger)
            if waits and overtakes and is_short and member.replica_id not in avoided_ids:
                # The policy counts work that this run overtakes.
                other, decision = member, HEADROOM_DECISION
            if other is not charged_to and self._may_start(run, other, decision):
                self._metrics.requests_recalled += 1
                yield run, (other, decision)

    @property
    def _gate(self) -> AdmissionGate:
        assert self._admission_gate is not None
        return self._admission_gate

    def _may_start(self, run: StageRun, member: PoolMember, decision: Decision) -> bool:
        tokens = run.prompt_tokens - decision.matched_tokens
        return self._headroom.has_room(run, member, tokens) and not self.unsent.is_behind(run, member, _ticket(run))

    def _is_over_share(self, run: StageRun) -> bool:
        return self._gate.admission.is_over_share(_ticket(run), self._clock())

    def _headroom_size(self) -> HeadroomSize:
        return self._gate.admission.config.headroom


def _ticket(run: StageRun) -> Ticket:
    assert run.ticket is not None
    return run.ticket
