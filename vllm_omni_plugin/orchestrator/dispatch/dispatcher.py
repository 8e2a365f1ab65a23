"""The runs of one stage: each goes to a replica, its outputs come back, and it moves when its replica is lost.

Who owns what of a stage's mutable state, all on the orchestrator's loop:

    StagePool      which replicas serve, and what is charged to each: a run is in `PoolMember.in_flight`, or
    WaitingRuns    it waits, for one reason. A run that has not ended is in exactly one of the two.
    Suspects       which suspects are kept apart where
    EngineRefusals which engines have refused runs, being paused
    StageSituation whether more replicas are awaited after an outage
    StageRun       the phase of one run; only its own methods change it

State changes here and in `RunFinisher` only. On any event the change is made first. Then `next_step`, which changes
nothing, names what to do with the run that has come or with those that wait, one thing after the other, and `_perform`
does it. A send never causes anything else at once: a replica that turns out to be dead is lost in the loop's next turn.
"""

import itertools
from collections.abc import Sequence
from math import inf
from typing import TYPE_CHECKING, Any

from vllm_omni_plugin.errors import (
    MessageTooLargeError,
    OmniError,
    ReplicaError,
    RequestLostError,
    RequestRefusedError,
)
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadContext, StageRules
from vllm_omni_plugin.orchestrator.dispatch.next_step import MAX_HELD_REQUESTS, Action, Step, next_step
from vllm_omni_plugin.orchestrator.dispatch.run_finisher import RunFinisher
from vllm_omni_plugin.orchestrator.dispatch.stage_situation import StageSituation, ticket_of
from vllm_omni_plugin.orchestrator.dispatch.stall_watch import StallWatch
from vllm_omni_plugin.orchestrator.dispatch.suspects import MAX_APART_WAIT_S, Suspects
from vllm_omni_plugin.orchestrator.dispatch.waiting_runs import HELD, Choice, Place, WaitingRuns, WaitReason
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.counters import WaitingCounts, count_reason
from vllm_omni_plugin.orchestrator.requests.stage_run import Loss, RunEnded, StageRun
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Move

if TYPE_CHECKING:
    # It imports vLLM.
    from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi


CLIENTS_CACHE_S = 15.0
"""Seconds within which a cache that a client's prefill has left must be asked for: half of NIXL's lease."""


class Dispatcher:
    """Assigns the runs of one stage to replicas, and sends them. Nothing in it waits.

    The methods return the runs that have ended otherwise than by an output.
    """

    def __init__(
        self, *, pool: StagePool, api: "EngineApi", head: HeadContext, rules: StageRules, stalls: StallWatch
    ) -> None:
        self._pool = pool
        self._api = api
        self._head = head
        self._rules = rules
        self._stalls = stalls
        self._attempts = itertools.count(1)
        waiting = self._waiting = WaitingRuns()
        self._suspects = Suspects(pool)
        self._situation = StageSituation(
            pool=pool, head=head, rules=rules, suspects=self._suspects, choose=self._choose
        )
        self.finisher = RunFinisher(pool=pool, api=api, head=head, suspects=self._suspects, runs=self)
        # Replicas that may have room, since a run has left them otherwise than by an output.
        self._freed: dict[PoolMember, None] = {}
        head.metrics.waiting_in[pool.stage_id] = lambda: WaitingCounts(
            waiting.count(*HELD),
            waiting.count(WaitReason.PAUSED),
            waiting.count(WaitReason.MOVING, WaitReason.RETURNED, WaitReason.SUSPECT),
            waiting.count(WaitReason.QUEUED),
        )

    @property
    def can_assign(self) -> bool:
        return bool(self._pool.serving)

    def submit(self, run: StageRun) -> Sequence[RunEnded]:
        if run.ticket is not None and len(self._waiting):
            # Timers of a busy head are late.
            self._take_steps()
        step = next_step(self._waiting, self._situation, self._head.clock(), run)
        assert step is not None
        self._perform(step, None)
        if self._situation.awaits_replicas:
            self._take_steps()
        return self.finisher.take_ended()

    def add_chunk(self, run: StageRun, chunk: Any) -> Sequence[RunEnded]:
        """Add a chunk to a streaming-input session; a chunk that is not resumable closes the input."""
        session = run.streaming
        assert session is not None
        member = None if run.replica_id is None else self._pool.member(run.replica_id)
        run.add_chunk(chunk)
        if run.finished:
            self.finisher.complete(run)
        if member is not None and run.sent:
            session.note_sent(chunk)
            if session.open_turns == 1:
                # The replica had answered all so far.
                self._stalls.asked(member, run)
            self._send(member, run, chunk)
        else:
            session.unsent.append(chunk)
        return self.finisher.take_ended()

    def send_waiting(self, member: PoolMember) -> Sequence[RunEnded]:
        """Send what waits to a replica that may have room, after an output or a report of it."""
        if len(self._waiting):
            self._take_steps(member)
        return self.finisher.take_ended()

    def stop_waiting_for(self, member: PoolMember) -> Sequence[RunEnded]:
        """A replica is cordoned: the runs that wait for it go to other replicas, or wait until one serves."""
        self._place_again(member)
        return self.finisher.take_ended()

    def move(self, runs: Sequence[StageRun], lost: PoolMember, loss: Loss, engine_failed: bool) -> Sequence[RunEnded]:
        """A replica is lost, and these runs are no longer charged to it: each moves or fails, or is assigned again if
        the replica had not got it. `engine_failed`: a request may be the cause, see `Suspects`."""
        if engine_failed and not self._pool.lockstep:
            self._suspects.engine_crashed(runs, loss)
        # Suspects without outputs first, so that the others can avoid the replicas where they are apart.
        for run in sorted(runs, key=lambda run: (not run.crash_losses, run.has_output)):
            try:
                if run.sent:
                    self._move(run, lost, loss)
                else:
                    run.unassign()
                    self._wait(run, WaitReason.RETURNED)
            except Exception as error:
                self.finisher.fail_unexpectedly(run, error)
        self._suspects.update(lost.replica_id)
        self._take_steps()
        self._place_again(lost)
        return self.finisher.take_ended()

    def replica_serves(self) -> Sequence[RunEnded]:
        """A replica serves again: send it what waits."""
        held = self._waiting.count(*HELD) + self._head.metrics.held_before_accept
        self._situation.returned(runs_wait=held > 0)
        self._take_steps(*self._pool.serving)
        return self.finisher.take_ended()

    def tick(self) -> Sequence[RunEnded]:
        """Time has passed: end what has waited too long, and send others that may go on."""
        self._situation.time_passed()
        freed, self._freed = self._freed, {}
        self._take_steps(*freed)
        return self.finisher.take_ended()

    def refused(self, run: StageRun, member: PoolMember) -> bool:
        """A paused engine has refused a run. Returns whether it waits here, or its client gets the refusal.

        Calls reach replicas at different times, so a run that one engine refuses goes to the others first. What all
        refuse is refused to the client, as with one engine, unless the fleet had accepted it before the pause: then it
        waits, as it would in an engine.
        """
        now, refusals = self._head.clock(), self._pool.refusals
        refusals.refused(member.replica_id, now)
        if run.streaming is not None and not run.streaming.replayable:
            # The chunks that the replica was sent are gone.
            return False
        run.refused_by = {*run.refused_by, member.replica_id}
        refusing = refusals.refusing(now).union(run.refused_by)
        accepted = run.losses or run.first_request is not None or self._rules.has_upstream
        if run.affinity_key is None and any(other.replica_id not in refusing for other in self._pool.serving):
            reason = WaitReason.RETURNED
        elif accepted and self._waiting.count(WaitReason.PAUSED) < MAX_HELD_REQUESTS:
            # While none serves, nothing would end a wait for the end of the pause.
            reason, run.refused_by = WaitReason.PAUSED if self._pool.serving else WaitReason.RETURNED, ()
            if reason is WaitReason.PAUSED and not self._waiting.count(reason):
                refusals.first_waits(now)
        else:
            return False
        self._take_from(member, run, reason)
        self._head.wake_at(now if reason is WaitReason.RETURNED else refusals.next_try_at)
        return True

    def cache_missed(self, run: StageRun, member: PoolMember) -> None:
        """The engine of a decode could not fetch what a prefill has left: the next attempt computes the prompt."""
        self._head.metrics.request_moves[Move.RESTART] += 1
        self._take_from(member, run, WaitReason.RETURNED)
        self._head.wake_at(self._head.clock())

    def take_back_cache(self, run: StageRun) -> None:
        """The cache that a prefill has left for a run is gone. An engine that may still wait for it waits for ever."""
        if run.awaits_cache and run.replica_id is not None:
            member = self._pool.member(run.replica_id)
            self.finisher.abort_at(member, [run.engine_request_id])
            self.cache_missed(run, member)
        run.first_request = run.request

    def take_back_awaited_caches(self, member: PoolMember) -> bool:
        """A replica has computed nothing for long. It has not stalled if all its runs await caches: they do without."""
        runs = list(member.in_flight.values())
        if not all(run.awaits_cache for run in runs):
            return False
        for run in runs:
            self.take_back_cache(run)
        return True

    def run_ended(self, run: StageRun) -> None:
        """A run has ended, also because its client hung up: it waits no more."""
        if run.replica_id is None:
            self._waiting.remove(run)
        if run.ticket is not None and self._head.gate is not None:
            self._head.gate.dequeue(run.ticket)
        if run.crash_losses and run.replica_id is not None:
            self.apart_changed(run.replica_id)

    def may_have_room(self, member: PoolMember) -> None:
        """A run has left a replica otherwise than by an output."""
        if self._waiting.count(WaitReason.QUEUED):
            self._freed[member] = None
            self._head.wake_at(self._head.clock())

    def apart_changed(self, replica_id: int) -> None:
        """A suspect at a replica has ended, or has got tokens."""
        if replica_id in self._suspects.apart and self._suspects.update(replica_id):
            self._head.wake_at(self._head.clock())

    def _take_steps(self, *freed: PoolMember) -> None:
        """Do what `next_step` says, for each replica that may have room."""
        for member in freed or (None,):
            while (step := next_step(self._waiting, self._situation, self._head.clock(), member)) is not None:
                self._perform(step, self._waiting.remove(step.run))
                if step.action is Action.SEND and not (step.run.sent or step.run.ended):
                    # The replica turned out to be dead.
                    break
        end = self._waiting.first_end()
        if end is not None:
            self._head.wake_at(end[0])
        if self._waiting.count(WaitReason.MOVING):
            self._head.wake_at(self._head.moves.next_at)
        if self._waiting.count(WaitReason.PAUSED) and self._pool.serving:
            self._head.wake_at(self._pool.refusals.next_try_at)

    def _perform(self, step: Step, place: Place | None) -> None:
        """Do what `next_step` says of a run. `place`: where it has waited."""
        run, action, choice, reason, error = step
        try:
            if place is not None and action is not Action.EXPIRE:
                self._note_waited(place)
            match action:
                case Action.SEND:
                    assert choice is not None
                    self._send_to(run, choice, place is not None and place.reason is WaitReason.QUEUED)
                case Action.WAIT:
                    assert reason is not None
                    if reason is WaitReason.QUEUED and self._head.gate is not None:
                        self._head.gate.enqueue(run, ticket_of(run), self._evict)
                    limit = MAX_APART_WAIT_S if reason is WaitReason.SUSPECT else inf
                    self._wait(run, reason, self._rules.replica_wait if reason in HELD else limit, choice)
                case Action.EXPIRE:
                    self.finisher.expire(run)
                case Action.REFUSE:
                    has_waited = place is not None and place.reason in HELD
                    self.finisher.refuse(run, waited=self._rules.replica_wait if has_waited else 0.0)
                case Action.FAIL:
                    assert error is not None
                    raise error
        except (RequestRefusedError, RequestLostError) as refusal:
            self.finisher.fail(run, refusal)
        except Exception as unexpected:
            self.finisher.fail_unexpectedly(run, unexpected)

    def _note_waited(self, place: Place) -> None:
        """A run that has waited goes on, or ends: count its hold time, its move, or the try of a paused engine."""
        now = self._head.clock()
        if place.reason in HELD:
            self._head.metrics.hold_time_seconds.observe(now - place.since)
        elif place.reason is WaitReason.MOVING:
            self._head.moves.spend()
        elif place.reason is WaitReason.PAUSED:
            self._pool.refusals.tries(now, others_wait=self._waiting.count(WaitReason.PAUSED) > 0)

    def _choose(self, run: StageRun) -> Choice | Exception:
        """The policy's choice now, or why there is none; charges nothing."""
        try:
            if not run.task or run.move is not Move.RESTART:
                plain = run.move is Move.RESTART and run.first_request is None
                run.task, run.affinity_key = self._api.describe(run.request if plain else self._request_of(run))
                if run.ticket is not None:
                    run.count_prompt()
            is_pinned = run.affinity_key is not None and self._api.how_to_move(run.request) is Move.PINNED
            may_avoid = run.crash_losses or run.refused_by or self._situation.awaits_replicas
            avoided = self._situation.avoided(run) if may_avoid else ()
            return self._pool.decide(run.task, run.affinity_key, avoided, is_pinned)
        except Exception as error:
            return error

    def _send_to(self, run: StageRun, choice: Choice, was_queued: bool) -> None:
        """Charge a run to a replica, and send it there. If the replica is dead, the run moves with the others there."""
        member, decision = choice
        if was_queued and not (member.ledger.pending or self._situation.is_over_share(run)):
            self._head.metrics.idle_while_waiting += 1
        now = self._head.clock()
        if run.first_request is not None and now > run.first_until:
            # The maker of the cache may have given its memory to another prompt.
            run.first_request = run.request
        plain = run.move is Move.RESTART and run.first_request is None
        request = run.request if plain else self._request_of(run)
        if run.first_request is None and (run.attempts or now - run.submitted_at > CLIENTS_CACHE_S):
            # Likewise the cache that a client names, which may have been fetched, too.
            request = self._api.without_hand_over(request)
        attempt = f"{run.request_id}-{self._head.tag}-{next(self._attempts):x}"
        run.assign(member.replica_id, attempt, run.task, decision, now)
        self._pool.charge(member, run)
        metrics = self._head.metrics
        count_reason(metrics.decisions, (member.stage_id, self._pool.policy, decision.reason))
        if decision.fallback:
            count_reason(metrics.decision_fallbacks, (member.stage_id, self._pool.policy, decision.fallback))
        if run.crash_losses:
            self._suspects.assigned(run, member)
        self._send(member, run, request)
        if run.ended or not run.sent:
            return
        if run.streaming is not None:
            for chunk in run.streaming.take_unsent():
                self._send(member, run, chunk)
        if request.abort_immediately:
            # vLLM submits such a request only for its clean-up in the engine, which sends no output for it.
            self.finisher.complete(run)

    def _request_of(self, run: StageRun) -> Any:
        """What the next attempt sends: the request, or its continuation after what was delivered."""
        request = run.request if run.attempts or run.first_request is None else run.first_request
        return request if run.move is Move.RESTART else self._api.continuation(request, run.move, run.produced)

    def _send(self, member: PoolMember, run: StageRun, request: Any) -> None:
        """Send a request; one too large fails, and a failed send is a loss in the loop's next turn."""
        assert member.client is not None
        try:
            member.client.add_request(request, run.engine_request_id)
            if not run.sent:
                self._note_sent(member, run)
        except MessageTooLargeError as error:
            self.finisher.fail(run, error)
        except ReplicaError:
            return
        except Exception as error:
            self.finisher.fail_unexpectedly(run, OmniError(f"The request could not be encoded for the engine: {error}"))

    def _note_sent(self, member: PoolMember, run: StageRun) -> None:
        member.ledger.mark_sent(run)
        self._stalls.asked(member, run)
        if run.ticket is not None and self._head.gate is not None:
            self._head.gate.started(run.ticket)
        if run.first_sent_at is None:
            run.first_sent_at = run.asked_at
            self._head.metrics.queue_time_seconds.observe(run.first_sent_at - run.submitted_at)
        if run.chosen_replicas is not None and not run.produced:
            run.chosen_replicas.append((member.name, run.decision))

    def _take_from(self, member: PoolMember, run: StageRun, reason: WaitReason) -> None:
        """A run that a replica has, and of which nothing has come, waits again."""
        self._pool.release(run)
        run.unassign()
        self.apart_changed(member.replica_id)
        self._wait(run, reason)

    def _wait(self, run: StageRun, reason: WaitReason, wait: float = inf, wants: Choice | None = None) -> None:
        ends_at = self._waiting.add(run, reason, self._head.clock(), wait, wants)
        if ends_at < inf:
            self._head.wake_at(ends_at)

    def _evict(self, run: StageRun, error: RequestRefusedError) -> None:
        self.finisher.fail(run, error)
        # The request that takes its place may be at another stage; then only `tick` returns the ended run.
        self._head.wake_at(self._head.clock())

    def _place_again(self, member: PoolMember) -> None:
        """A replica serves no more: the runs that wait for it, and all if none serves, wait for others."""
        runs = self._waiting.waiting_for(member)
        if not self._pool.serving:
            runs = [*self._waiting.runs(WaitReason.QUEUED), *self._waiting.runs(WaitReason.PAUSED)]
        for run in runs:
            self._wait(run, WaitReason.RETURNED)
        self._take_steps()

    def _move(self, run: StageRun, lost: PoolMember, loss: Loss) -> None:
        """Let a run of a lost replica wait to move; fail it if it cannot, end it if only its end was missing."""
        move = self._api.how_to_move(run.request)
        error = run.lose_replica(loss, self._rules.migration_limit, move, self._api.vocabulary)
        if error is not None:
            self.finisher.fail(run, error)
        elif not self.finisher.complete_if_whole(run, lost):
            self._head.metrics.request_moves[run.move] += 1
            self._wait(run, WaitReason.MOVING)
