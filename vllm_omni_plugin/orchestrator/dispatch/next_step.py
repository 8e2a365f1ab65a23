"""Decides, on any event, which waiting run goes where now."""

from enum import Enum
from itertools import islice
from typing import NamedTuple

from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.errors import NoReplicaError
from vllm_omni_plugin.orchestrator.dispatch.stage_situation import StageSituation
from vllm_omni_plugin.orchestrator.dispatch.waiting_runs import (
    HELD,
    MAX_GROUPS,
    Choice,
    WaitingRuns,
    WaitReason,
    deadline,
)
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.send_window import short_prefill_tokens
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

ROOM = "room"
"""The reason of a decision for a replica that has room, against the policy, whose replica has none."""
ROOM_DECISION = Decision(0, ROOM, by_policy=False)
MAX_HELD_REQUESTS = 4096
"""Requests that may wait for a replica to serve, or for the end of a pause. More would only be late after the gap, so
they are refused at once."""


class Action(Enum):
    """What happens to a run."""

    SEND = "send"
    """It goes to the replica of the step."""
    WAIT = "wait"
    """It waits for the reason of the step; if it is queued, for the replica of the step, or without one for any."""
    REFUSE = "refuse"
    """It has waited for a replica in vain, or may not wait for one."""
    EXPIRE = "expire"
    """Its first token would come after its deadline."""
    FAIL = "fail"
    """No replica can be chosen for it, because of the error of the step."""


class Step(NamedTuple):
    run: StageRun
    action: Action
    choice: Choice | None = None
    reason: WaitReason | None = None
    error: Exception | None = None


def next_step(
    waiting: WaitingRuns, stage: StageSituation, now: float, event: StageRun | PoolMember | None = None
) -> Step | None:
    """The next thing to do; None: all wait. Changes nothing, and its cost does not grow with what waits.

    1. A run that has just come is sent, waits or ends.
    2. What has waited long enough ends, or goes on.
    3. Runs go on whose reason to wait is gone: of lost replicas, refused, suspects, held, and those that wait for the
       end of a pause.
    4. Queued runs go to the replica that may have room.

    Args:
        event: a run that has come and does not wait yet; or a replica that may have room for queued runs.
    """
    if isinstance(event, StageRun):
        run, before = event, None
        if stage.awaits_replicas and _may_be_held(waiting, stage, run):
            # Behind those that are held.
            return Step(run, Action.WAIT, reason=WaitReason.NO_REPLICA)
    else:
        waited = _next_that_goes_on(waiting, stage, now)
        if waited is None:
            return None if event is None else _next_queued(waiting, stage, event)
        run, before = waited, waiting.place(waited).reason
    if run.ticket is not None and deadline(run) <= now:
        return Step(run, Action.EXPIRE)
    if run.crash_losses and before is not WaitReason.SUSPECT and stage.must_wait_apart(run):
        return Step(run, Action.WAIT, reason=WaitReason.SUSPECT)
    choice = stage.choose(run)
    if isinstance(choice, NoReplicaError):
        if before in HELD or not _may_be_held(waiting, stage, run):
            return Step(run, Action.REFUSE)
        return Step(run, Action.WAIT, reason=WaitReason.CONFINED if run.confined_to else WaitReason.NO_REPLICA)
    if isinstance(choice, Exception):
        return Step(run, Action.FAIL, error=choice)
    if run.ticket is None or not stage.needs_room(run):
        return Step(run, Action.SEND, choice)
    return _send_or_queue(stage, run, choice, is_first=not _is_behind(waiting, stage, run, choice[0]))


def _may_be_held(waiting: WaitingRuns, stage: StageSituation, run: StageRun) -> bool:
    return waiting.count(*HELD) < MAX_HELD_REQUESTS and stage.may_be_held(run)


def _next_that_goes_on(waiting: WaitingRuns, stage: StageSituation, now: float) -> StageRun | None:
    """The first run whose wait is over or whose reason is gone; in this order of reasons."""
    end = waiting.first_end()
    if end is not None and end[0] <= now:
        return end[1]
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
        if (run := waiting.first(WaitReason.NO_REPLICA)) is not None:
            return run
        if (run := waiting.first_confined_to(stage.serving)) is not None:
            return run
    return waiting.first(WaitReason.PAUSED) if stage.tries_paused else None


def _is_behind(waiting: WaitingRuns, stage: StageSituation, run: StageRun, member: PoolMember) -> bool:
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


def _next_queued(waiting: WaitingRuns, stage: StageSituation, member: PoolMember) -> Step | None:
    """The next queued run for a replica with room: its own first; if idle, one of which another has cached part."""
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
            choice = wants or stage.choose(run)
            if isinstance(choice, Exception):
                return Step(run, Action.FAIL, error=choice)
            return _send_or_queue(stage, run, choice, freed=member)
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


def _send_or_queue(
    stage: StageSituation, run: StageRun, choice: Choice, is_first: bool = True, freed: PoolMember | None = None
) -> Step:
    """Send an admitted run to the chosen replica, or to another one with room, or let it wait.

    Args:
        is_first: whether no queued run goes before it.
        freed: a replica that has room for it.
    """
    member, decision = choice
    if is_first and stage.has_room(run, member, run.prompt_tokens - decision.matched_tokens):
        return Step(run, Action.SEND, choice)
    if stage.is_bound(run) or decision.matched_tokens > short_prefill_tokens(member.ledger):
        return Step(run, Action.WAIT, choice, WaitReason.QUEUED)
    if is_first and (other := freed or stage.replica_with_room(run)) is not None:
        return Step(run, Action.SEND, (other, ROOM_DECISION))
    return Step(run, Action.WAIT, reason=WaitReason.QUEUED)
