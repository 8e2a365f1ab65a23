"""Requests that engines may have died of: each is tried apart from the others, and none gets a third replica."""

from collections.abc import Callable, Collection, Iterable, Sequence

from vllm_omni_plugin.errors import NoReplicaError
from vllm_omni_plugin.orchestrator.dispatch.hold_queue import HoldQueue
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.stage_run import Accepted, Loss, StageRun

WAIT_S = 10.0
"""Seconds that a suspect waits for a replica without another one. Where many wait, most of them are innocent."""
TRIAL_OUTPUTS = 4
"""New outputs of a replica that end a trial there. One is not enough: what an engine has computed ahead is lost with
it, so of two engines that die at the same token the second may have sent more."""


class Suspects:
    """The suspects of one stage. Lives on the orchestrator's loop.

    When an engine crashes, or says what cannot be used, each request in flight there may be the cause. These are the
    suspects, to their end, or until another one is found to be the cause. Each is tried at another replica until it has
    had some new output of it, if possible where no other suspect is tried and where no new request goes meanwhile.

    If a second replica crashes, those that were in flight on both are looked at. The only one that is on trial there,
    or else the only one at all, is guilty: it fails, and both losses are its doing and nobody else's. The others get no
    third replica either, whether one was found guilty or not, but may go back to those that crashed under them.

    Args:
        pool: the stage's replicas.
        wake_at: asks for calls of `next_free` at this time, in monotonic seconds.
        clock: monotonic seconds.

    Attributes:
        tries: who is tried where, by the replica's id; none is empty.
    """

    def __init__(
        self,
        pool: StagePool,
        wake_at: Callable[[float], None],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._wake_at = wake_at
        self._clock = clock
        self._line = HoldQueue(WAIT_S, wake_at)
        self._cleared: dict[StageRun, None] = {}
        self.tries: dict[int, set[StageRun]] = {}

    def __len__(self) -> int:
        """How many wait for a replica without another one."""
        return len(self._line) + len(self._cleared)

    def avoided(self, run: StageRun, refused: Collection[int] = ()) -> Collection[int]:
        """Ids of the replicas to which a request does not go if others serve.

        These are where suspects are tried, and for a suspect also those that it may have crashed, with all on their
        machines if that leaves any: one that is broken would make it guilty. For a request under which two replicas
        have crashed they are all others, too.

        Args:
            run: the request.
            refused: ids of those that have refused it.

        Raises:
            NoReplicaError: none of those to which it may go serves.
        """
        serving = {member.replica_id for member in self._pool.serving}
        others = serving.difference(member.replica_id for member in self._open_to(run))
        if run.confined_to and others == serving:
            raise NoReplicaError("None of the replicas that crashed under this request serves again.")
        tried, suspected = set(self.tries), run.unexplained_crashes
        if suspected:
            crashed = {loss.replica.replica_id for loss in suspected}
            machines = {loss.replica.machine for loss in suspected}
            beside = {member.replica_id for member in self._pool.serving if member.machine in machines}
            wishes = [tried | crashed | beside, tried | crashed, tried]
        else:
            # One that is kept apart to its end would take a replica from all others for as long.
            wishes = [{place for place in tried if any(not _has_had_outputs(run) for run in self.tries[place])}]
        for wish in (*wishes, set[int]()):
            avoided = others.union(wish, refused)
            if not serving <= avoided:
                return avoided
        return others

    def can_go(self, run: StageRun) -> bool:
        """Whether a replica serves to which a request may go."""
        return bool(self._open_to(run))

    def hold(self, run: StageRun) -> bool:
        """Let a suspect wait if others are tried at all replicas that it may go to. Returns whether it waits."""
        must_wait = self._all_tried(self._open_to(run))
        if not self._on_trial(run) or not (must_wait or len(self._line)):
            return False
        if not must_wait:
            # Those in front of it may have to wait, as they may not go everywhere.
            self._wake_at(self._clock())
        return self._line.hold(run, self._clock())

    def begin(self, run: StageRun, member: PoolMember) -> None:
        """A suspect is sent to a replica."""
        if self._on_trial(run):
            self.tries.setdefault(member.replica_id, set()).add(run)

    def heard(self, member: PoolMember, accepted: Iterable[Accepted]) -> None:
        """New outputs came from a replica where suspects are tried."""
        for run, _ in accepted:
            if run in self.tries.get(member.replica_id, ()):
                run.outputs_since_crash += 1
                if not self._on_trial(run):
                    self.forget(run)

    def engine_failed(self, runs: Iterable[StageRun], loss: Loss) -> None:
        """An engine failed with these requests in flight. Who may have caused it is noted with them and the loss."""
        sent = [run for run in runs if run.sent]
        twice = [run for run in sent if self._crashed_before(run, loss)]
        tried = self.tries.get(loss.replica.replica_id, ())
        likely = [run for run in twice if run in tried] or twice
        for run in sent:
            if loss.others and run.has_output and run not in tried:
                run.excused_losses.append(loss)
            run.crash_losses.append(loss)
            run.outputs_since_crash = 0
        # Where other heads had requests, too, one that has begun before may be beside the one that it was.
        if len(likely) == 1 and not (loss.others and likely[0].produced):
            self._blame(likely[0])

    def lost(self, member: PoolMember) -> None:
        """A replica is lost; who was tried there is to be tried again."""
        self.tries.pop(member.replica_id, None)

    def forget(self, run: StageRun) -> None:
        """A suspect's trial is over, or it has ended: the next one may go where it was."""
        self._line.remove(run)
        self._cleared.pop(run, None)
        if run.replica_id in self.tries:
            tried = self.tries[run.replica_id]
            tried.discard(run)
            if not tried:
                del self.tries[run.replica_id]
        if len(self._line):
            # Not at once: where the next one is sent may turn out to be dead, with the rest of what is dealt with here.
            self._wake_at(self._clock())

    def next_free(self) -> StageRun | None:
        """The next one that waits and need not any longer, in order; it waits no more. To be asked until there is none.

        Because a replica is free for it, because another one is guilty, or because it has waited long enough.
        """
        if self._cleared:
            run = next(iter(self._cleared))
            del self._cleared[run]
            return run
        if not self._all_tried(self._pool.serving):
            for run in self._line:
                if not self._all_tried(self._open_to(run)):
                    self._line.remove(run)
                    return run
        return self._line.take_overdue(self._clock())

    def _on_trial(self, run: StageRun) -> bool:
        suspected = run.unexplained_crashes
        # A stage with one replica would serve nobody else meanwhile, so it crashes once more before that.
        if len(suspected) <= (len(self._pool.members) == 1):
            return False
        return len({loss.replica for loss in suspected}) > 1 or not _has_had_outputs(run)

    def _open_to(self, run: StageRun) -> Sequence[PoolMember]:
        """The replicas that serve and to which a request may go."""
        confined_to = run.confined_to
        if not confined_to:
            return self._pool.serving
        return [member for member in self._pool.serving if member in confined_to]

    def _all_tried(self, members: Sequence[PoolMember]) -> bool:
        """Whether suspects are tried at all of these; not if there is none, since who finds none waits as all do."""
        # Most often the lengths say all.
        return 0 < len(members) <= len(self.tries) and all(member.replica_id in self.tries for member in members)

    def _crashed_before(self, run: StageRun, loss: Loss) -> bool:
        """Whether a crash before this one counts against a request: of another replica, if there is one."""
        suspected = run.unexplained_crashes
        return any(before.replica is not loss.replica for before in suspected) or bool(
            suspected and not self._pool.serving
        )

    def _blame(self, guilty: StageRun) -> None:
        for loss in guilty.unexplained_crashes:
            loss.culprit = guilty
        # Who is not suspected of anything else need not wait, nor is a replica kept for it.
        for run in [run for run in self._line if not self._on_trial(run)]:
            self._line.remove(run)
            self._cleared[run] = None
        for tried in [*self.tries.values()]:
            for run in [run for run in tried if not self._on_trial(run)]:
                self.forget(run)


def _has_had_outputs(run: StageRun) -> bool:
    return run.outputs_since_crash >= TRIAL_OUTPUTS
