"""The requests of one stage: each goes to a replica, its outputs come back, and it moves when its replica is lost."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_omni_plugin.errors import (
    RequestLostError,
)
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.dispatch.sender import Sender
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolMember
from vllm_omni_plugin.orchestrator.requests.stage_run import Accepted, Loss, RequestPhase, RunEnded, StageRun

if TYPE_CHECKING:
    # Imports vLLM, which nothing here does.
    pass

logger = init_logger(__name__)


class Dispatcher(Sender):
    """Sees to the runs of one stage. Lives on the orchestrator's loop; nothing in it waits for anything.

    Runs that end otherwise than by an output of theirs are returned by the method in which that happened. Its arguments
    are those of `Sender`.
    """

    @property
    def can_dispatch(self) -> bool:
        """Whether a replica takes requests now."""
        return bool(self._pool.serving)

    def submit(self, run: StageRun) -> Sequence[RunEnded]:
        """Take a new run. There must be no other one of the same request."""
        self._dispatch(run)
        return self._take_ended() if self._ended else ()

    def add_chunk(self, run: StageRun, chunk: Any) -> Sequence[RunEnded]:
        """A further chunk of a streaming-input session was submitted; one that is not resumable closes the input."""
        session = run.streaming
        assert session is not None
        member = self._member_of(run)
        run.add_chunk(chunk)
        waits = run in self._queue
        if run.finished:
            self._end(run)
        if member is not None and not waits:
            session.note_sent(chunk)
            self._send(member, run, chunk)
        else:
            session.unsent.append(chunk)
        if run.finished:
            self._ended.append(RunEnded(run))
        return self._take_ended()

    def has_room(self, member: PoolMember) -> Sequence[RunEnded]:
        """An output or a report of a replica has been dealt with: what waits may go there."""
        if len(self._queue):
            self._fill(member)
        return self._take_ended() if self._ended else ()

    def held_back(self, member: PoolMember) -> Sequence[RunEnded]:
        """A replica gets no new requests. Those that wait for it go elsewhere, or to it if there is no other one."""
        if self._pool.serving:
            for run in self._queue.waiting_for(member):
                # One before may have pushed it out.
                if run in self._queue:
                    self._recall(run)
        return self._take_ended()

    def accept(self, member: PoolMember, outputs: Iterable[Any]) -> tuple[list[Accepted], Sequence[RunEnded]]:
        """A message came from a replica.

        Returns:
            What of it is to be delivered: outputs of current attempts that have not been delivered yet, under the
            client's ids. What is finished is released, anything else dropped.
        """
        accepted = []
        for output in outputs:
            run = member.in_flight.get(output.request_id)
            if run is None:
                if self._head_tag not in output.request_id and output.finish_reason is None:
                    # Another head has left it behind, and nobody else would end it.
                    self._abort_at(member, [output.request_id])
                continue
            output.request_id = run.request_id
            try:
                if run.phase is RequestPhase.STREAMING and output.finish_reason is None:
                    # Most outputs are in the middle of an answer.
                    member.account.produce(run, len(output.new_token_ids))
                    run.produced.extend(output.new_token_ids)
                elif not self._take(member, run, output):
                    continue
                accepted.append((run, output))
            except Exception as error:
                self._give_up_alone(run, error)
        if member.replica_id in self._suspects.tries:
            self._suspects.heard(member, accepted)
        return accepted, self._take_ended() if self._ended else ()

    def move(self, runs: Sequence[StageRun], lost: PoolMember, loss: Loss, engine_failed: bool) -> Sequence[RunEnded]:
        """These requests' replica is lost, and they are no longer charged to it: each moves or fails.

        Args:
            runs: the requests.
            lost: the replica.
            loss: of the replica.
            engine_failed: whether its engine crashed by itself or said what cannot be used: a request may be the cause.
        """
        if engine_failed and not self._pool.lockstep:
            self._suspects.engine_failed(runs, loss)
        self._suspects.lost(lost)
        for run in runs:
            self._queue.leave(run)
        self._dispatch_suspects()
        # Suspects first, so that the others can avoid the replicas where they are tried. Most engines that die of a
        # request do so at once.
        for run in sorted(runs, key=lambda run: (not run.suspicions, run.began)):
            try:
                self._move(run, lost, loss)
            except Exception as error:
                self._give_up_alone(run, error)
        return self._take_ended()

    def replica_serves(self) -> Sequence[RunEnded]:
        """A replica takes new requests: dispatch what was held, in order."""
        for run in list(self._held):
            # Where one is sent may turn out to be dead.
            if self._pool.serving and self._suspects.can_go(run):
                self._held.remove(run)
                self._metrics.hold_time.observe(self._clock() - run.waits_since)
                self._dispatch(run)
        self._dispatch_suspects()
        for member in self._pool.serving if len(self._queue) else ():
            self._fill(member)
        return self._take_ended()

    def tick(self) -> Sequence[RunEnded]:
        """Time has passed, as `wake_at` was told: refuse what has waited in vain, and let others go on."""
        while (run := self._held.take_overdue(self._clock())) is not None:
            self._metrics.hold_time.observe(self._held.wait)
            self._refuse(run, waited=self._held.wait)
        for run, error in self._queue.overdue():
            self._turn_away(run, error)
        self._dispatch_moving()
        self._dispatch_suspects()
        while (run := self._refused.take()) is not None:
            self._dispatch(run)
        while self._freed:
            self._fill(self._freed.popitem()[0])
        return self._take_ended()

    def _take(self, member: PoolMember, run: StageRun, output: Any) -> bool:
        """Take in an output of a current attempt. Returns whether it is to be delivered."""
        tokens, finished = output.new_token_ids, output.finish_reason is not None
        cut_short = finished and self._api.cut_short(output)
        if cut_short and self._goes_on_elsewhere(member, run, output):
            return False
        if not (run.began or cut_short):
            self._begin(member, run, output)
        # Counted whether the client gets it or not.
        member.account.produce(run, len(tokens))
        if run.joining and not self._fit(run, output, cut_short):
            return False
        run.deliver(output.new_token_ids, finished, cut_short)
        if finished and run.finished:
            self._end(run)
        return True

    def _goes_on_elsewhere(self, member: PoolMember, run: StageRun, output: Any) -> bool:
        """An engine has cut a request short. Returns whether it has only refused it, and another may take it."""
        if run.streaming is not None:
            # Chunks that were on their way begin the session anew there, and nobody would end that.
            self._abort_at(member, [run.engine_request_id])
        may_move = not run.began and self._api.refused(output) and not self._api.fetches_once(run.request)
        return may_move and self._refused.refuse(run, member)

    def _begin(self, member: PoolMember, run: StageRun, output: Any) -> None:
        cached_tokens = self._api.cached_tokens(output)
        self._pool.begin(member, run, cached_tokens)
        if cached_tokens is not None:
            self._metrics.matched_tokens += run.decision.matched_tokens
            self._metrics.cached_tokens += cached_tokens

    def _move(self, run: StageRun, lost: PoolMember, loss: Loss) -> None:
        move = self._api.how_to_move(run.request)
        error = run.lose_replica(loss, self._migration_limit, move, self._api.vocabulary)
        if error is not None:
            self._lose(run, error)
        elif not self._end_if_whole(run, lost):
            self._metrics.moves_by_way[run.move] += 1
            self._moving[run] = None
            self._dispatch_moving()

    def _dispatch_moving(self) -> None:
        # The next replica may turn out to be dead, too; then its requests come in here and have their turn below.
        if self._is_moving:
            return
        self._is_moving = True
        try:
            while self._moving and self._moves.take():
                run = next(iter(self._moving))
                del self._moving[run]
                self._dispatch(run)
        finally:
            self._is_moving = False
            if self._moving:
                self._wake_at(self._moves.next_at)

    def _dispatch_suspects(self) -> None:
        while (run := self._suspects.next_free()) is not None:
            self._dispatch(run, may_wait=False)

    def _fit(self, run: StageRun, output: Any, cut_short: bool) -> bool:
        """Fit output of a moved request to what was delivered before. Returns whether anything of it is new."""
        tokens, finished = output.new_token_ids, output.finish_reason is not None
        try:
            swallow = len(tokens) if cut_short else run.join(tokens, finished)
        except RequestLostError as error:
            self._metrics.diverged += 1
            self._lose(run, error)
            return False
        self._metrics.swallowed_tokens += swallow
        if run.finished:
            # The last turn of a session, of which nothing was missing.
            self._end(run)
            self._ended.append(RunEnded(run))
            return False
        if run.joining and not cut_short:
            return False
        self._api.fit(output, swallow)
        return True

    def _end_if_whole(self, run: StageRun, lost: PoolMember) -> bool:
        """End a lost request of which only the end was missing. Returns whether it was one."""
        outputs = self._api.missing_end(run.request, run.produced, lost.engine_index)
        # The parameters of a session bound a turn and not the whole.
        if outputs is None or run.streaming is not None:
            return False
        self._end(run)
        self._ended.append(RunEnded(run, outputs))
        return True
