"""Decides which waiting run goes where now."""

from collections.abc import Collection, Sequence
from enum import Enum
from itertools import islice
from typing import NamedTuple, Protocol

from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.orchestrator.dispatch.waiting_runs import MAX_GROUPS, Choice, WaitingRuns, WaitReason, deadline
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.send_window import short_prefill_tokens
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

ROOM = "room"
"""The reason of a decision for a replica that has room, against the policy, whose replica has none."""
ROOM_DECISION = Decision(0, ROOM, by_policy=False)


class Action(Enum):
    """What happens to a run."""

    ASSIGN = "assign"
    """The policy chooses its replica. If there is none, or none has room, the run waits again."""
    SEND = "send"
    """It goes to the replica of the step."""
    WAIT_FOR = "wait for"
    """It waits for the replica of the step, which has much of its prompt cached; without one, for any."""
    REFUSE = "refuse"
    """It has waited for a replica in vain."""
    EXPIRE = "expire"
    """Its first token would come after its deadline."""


class Step(NamedTuple):
    run: StageRun
    action: Action
    choice: Choice | None = None


class StageNow(Protocol):
    """What a decision sees of the stage.

    Attributes:
        serving: the replicas that take new requests.
        awaits_replicas: more replicas are about to return after an outage.
        may_move: a run of a lost replica may move now.
        tries_paused: a run that paused engines have refused may be sent now.
    """

    @property
    def serving(self) -> Sequence[PoolMember]: ...

    @property
    def awaits_replicas(self) -> bool: ...

    @property
    def may_move(self) -> bool: ...

    @property
    def tries_paused(self) -> bool: ...

    def allowed(self, run: StageRun) -> Collection[PoolMember]:
        """The serving replicas to which a run may go at all."""

    def must_wait_apart(self, run: StageRun) -> bool:
        """Whether a suspect finds other suspects wherever it may go."""

    def avoids(self, run: StageRun, member: PoolMember) -> bool:
        """Whether a run does not go to a replica now, since others serve."""

    def has_room(self, run: StageRun, member: PoolMember, tokens: int) -> bool:
        """Whether a replica has room for a run with so many tokens to compute."""

    def replica_with_room(self, run: StageRun) -> PoolMember | None:
        """The replica with the fewest requests among those that have room for a run."""

    def is_over_share(self, run: StageRun) -> bool: ...

    def is_bound(self, run: StageRun) -> bool:
        """Whether a run goes nowhere but where the policy or its key says."""

    def choose(self, run: StageRun) -> Choice:
        """The policy's choice now; charges nothing."""


def next_step(waiting: WaitingRuns, stage: StageNow, now: float, freed: PoolMember | None = None) -> Step | None:
    """The next thing to do with the waiting runs; None: all wait. Changes nothing.

    1. What has waited long enough ends, or goes on.
    2. Runs that need no room go: of lost replicas, refused, held, suspects, and those that wait for the end of a pause.
    3. Queued runs go to the replica that may have room.

    Args:
        freed: a replica that may have room for queued runs.
    """
    end = waiting.first_end()
    if end is not None and end[0] <= now:
        return _at_end(waiting, stage, now, end[1])
    run = _next_without_room(waiting, stage)
    if run is not None:
        return Step(run, Action.ASSIGN)
    return None if freed is None else _next_queued(waiting, stage, freed)


def on_arrival(waiting: WaitingRuns, stage: StageNow, run: StageRun, choice: Choice) -> Step:
    """What an admitted run does for which the policy has just chosen a replica: it is sent, or waits."""
    member, decision = choice
    is_first = not _is_behind(waiting, stage, run, member)
    if is_first and stage.has_room(run, member, run.prompt_tokens - decision.matched_tokens):
        return Step(run, Action.SEND, choice)
    if stage.is_bound(run) or decision.matched_tokens > short_prefill_tokens(member.ledger):
        return Step(run, Action.WAIT_FOR, choice)
    if is_first and (other := stage.replica_with_room(run)) is not None:
        return Step(run, Action.SEND, (other, ROOM_DECISION))
    return Step(run, Action.WAIT_FOR)


def _is_behind(waiting: WaitingRuns, stage: StageNow, run: StageRun, member: PoolMember) -> bool:
    """Whether a queued run goes to a replica before this one."""
    assert run.ticket is not None
    over_share = None
    for ticket, first in waiting.queued_for(member):
        if ticket > run.ticket:
            return False
        over_share = stage.is_over_share(run) if over_share is None else over_share
        if over_share or not stage.is_over_share(first):
            return True
    return False


def _at_end(waiting: WaitingRuns, stage: StageNow, now: float, run: StageRun) -> Step:
    if deadline(run) <= now:
        return Step(run, Action.EXPIRE)
    if waiting.place(run).reason is WaitReason.NO_REPLICA and not stage.allowed(run):
        return Step(run, Action.REFUSE)
    # A suspect that has waited long enough, or a run that was left to replicas that have not come back.
    return Step(run, Action.ASSIGN)


def _next_without_room(waiting: WaitingRuns, stage: StageNow) -> StageRun | None:
    if (run := waiting.first(WaitReason.RETURNED)) is not None:
        return run
    if (run := waiting.first(WaitReason.MOVING)) is not None and stage.may_move:
        return run
    for run in islice(waiting.runs(WaitReason.SUSPECT), MAX_GROUPS):
        if not stage.must_wait_apart(run):
            return run
    if not stage.serving:
        return None
    if not stage.awaits_replicas or any(member.ledger.can_start for member in stage.serving):
        for run in waiting.runs(WaitReason.NO_REPLICA):
            if stage.allowed(run):
                return run
    return waiting.first(WaitReason.PAUSED) if stage.tries_paused else None


def _next_queued(waiting: WaitingRuns, stage: StageNow, member: PoolMember) -> Step | None:
    serves = member.status is ReplicaStatus.UP
    for _, run in waiting.queued_for(member):
        wants = waiting.place(run).wants
        if wants is None and not serves:
            continue
        tokens = run.prompt_tokens - (0 if wants is None else wants[1].matched_tokens)
        if not stage.has_room(run, member, tokens):
            if not stage.is_over_share(run):
                # No run overtakes it.
                return None
        elif not stage.avoids(run, member):
            return _send_or_wait(stage, run, member) if wants is None else Step(run, Action.SEND, wants)
    if member.ledger.prefill_tokens or not serves:
        return None
    # It computes no prompt now: it begins one that is cached elsewhere, if that is less than what is to compute there.
    for _, run in waiting.queued_for(member, others=True):
        wants = waiting.place(run).wants
        assert wants is not None
        chosen, decision = wants
        # Without cached tokens it is bound to that replica.
        if not 0 < decision.matched_tokens < chosen.ledger.prefill_tokens + waiting.tokens_for(chosen):
            continue
        if stage.has_room(run, member, run.prompt_tokens) and not stage.avoids(run, member):
            return Step(run, Action.SEND, (member, ROOM_DECISION))
    return None


def _send_or_wait(stage: StageNow, run: StageRun, member: PoolMember) -> Step:
    chosen, decision = stage.choose(run)
    if chosen is member or stage.has_room(run, chosen, run.prompt_tokens - decision.matched_tokens):
        return Step(run, Action.SEND, (chosen, decision))
    if decision.matched_tokens > short_prefill_tokens(member.ledger):
        return Step(run, Action.WAIT_FOR, (chosen, decision))
    return Step(run, Action.SEND, (member, ROOM_DECISION))
