"""What decisions about runs see of their stage."""

from collections.abc import Callable, Collection, Sequence

from vllm_omni_plugin.admission import Ticket
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadContext, StageRules
from vllm_omni_plugin.orchestrator.dispatch.suspects import Suspects
from vllm_omni_plugin.orchestrator.dispatch.waiting_runs import Choice
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.send_window import has_room
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

RETURN_INTERVAL_S = 1.0
"""Seconds for which the next replica is awaited after each return."""


class StageSituation:
    """Reads the pool, its policy, suspects and admission. The only thing that it keeps is whether replicas are awaited.

    After an outage, replicas return one after the other. Each gets at once what it can start; the rest is left to those
    that are still to come, or the first one would get everything. It loses nothing by that: it would wait there, too.

    Attributes:
        choose: the policy's choice for a run now, or why there is none; charges nothing.
        must_wait_apart: whether a suspect finds other suspects wherever it may go.
        awaits_replicas: more replicas are about to return after an outage.
    """

    def __init__(
        self,
        *,
        pool: StagePool,
        head: HeadContext,
        rules: StageRules,
        suspects: Suspects,
        choose: Callable[[StageRun], Choice | Exception],
    ) -> None:
        self.choose = choose
        self.must_wait_apart = suspects.must_wait
        self.awaits_replicas = False
        self._pool = pool
        self._head = head
        self._rules = rules
        self._suspects = suspects
        self._awaited_until = 0.0

    @property
    def serving(self) -> Sequence[PoolMember]:
        return self._pool.serving

    @property
    def may_move(self) -> bool:
        """Whether a run of a lost replica may move now."""
        return self._head.moves.has_one

    @property
    def tries_paused(self) -> bool:
        """Whether a run that paused engines have refused may be sent now."""
        return self._head.clock() >= self._pool.refusals.next_try_at

    def returned(self, runs_wait: bool) -> None:
        """A replica serves again; `runs_wait`: some wait since none served."""
        if self.awaits_replicas or (runs_wait and len(self._pool.serving) == 1):
            self.awaits_replicas = True
            self._awaited_until = self._head.clock() + RETURN_INTERVAL_S
            self._head.wake_at(self._awaited_until)

    def time_passed(self) -> None:
        self.awaits_replicas = self.awaits_replicas and self._head.clock() < self._awaited_until
        if self.awaits_replicas:
            self._head.wake_at(self._awaited_until)

    def may_be_held(self, run: StageRun) -> bool:
        """Whether a run may wait for a replica to serve."""
        # `abort_immediately` is for a clean-up in the engine, and there is none.
        return self._rules.replica_wait > 0 and not run.request.abort_immediately

    def avoids(self, run: StageRun, member: PoolMember) -> bool:
        """Whether a run does not go to a replica now, since others serve."""
        avoided = self.avoided(run)
        return member.replica_id in avoided and any(other.replica_id not in avoided for other in self._pool.serving)

    def is_over_share(self, run: StageRun) -> bool:
        gate = self._head.gate
        return gate is not None and gate.admission.is_over_share(ticket_of(run), self._head.clock())

    def is_bound(self, run: StageRun) -> bool:
        """Whether a run goes nowhere but where the policy or its key says."""
        return run.affinity_key is not None or not self._pool.any_replica

    def needs_room(self, run: StageRun) -> bool:
        """Whether a run with a ticket is sent only to a replica that has room for it."""
        # A suspect has its replica for itself.
        return self._pool.waits_for_room and not run.crash_losses and not run.request.abort_immediately

    def has_room(self, run: StageRun, member: PoolMember, tokens: int) -> bool:
        """Whether a replica has room for a run with so many tokens to compute."""
        ledger, over_share = member.ledger, self.is_over_share(run)
        newest = ledger.newest_pending
        behind_in_share = over_share and newest is not None and not self.is_over_share(newest)
        return has_room(ledger, tokens, over_share, behind_in_share)

    def replica_with_room(self, run: StageRun) -> PoolMember | None:
        """The replica with the fewest requests among those that have room for a run."""
        open_ones = [member for member in self._pool.serving if self.has_room(run, member, run.prompt_tokens)]
        return min(open_ones, key=lambda member: member.queue_length, default=None)

    def avoided(self, run: StageRun) -> Collection[int]:
        """Ids of the replicas to which a run does not go while others serve.

        Raises:
            NoReplicaError: no replica serves to which the run may go.
        """
        avoided = set[int]()
        if self.awaits_replicas and run.affinity_key is None:
            avoided = {member.replica_id for member in self._pool.serving if not member.ledger.can_start}
        if run.refused_by:
            avoided.update(self._pool.refusals.refusing(self._head.clock()), run.refused_by)
        # Last, since a suspect never goes where it may not go at all.
        return self._suspects.avoided(run, avoided) if run.crash_losses else avoided


def ticket_of(run: StageRun) -> Ticket:
    assert run.ticket is not None
    return run.ticket
