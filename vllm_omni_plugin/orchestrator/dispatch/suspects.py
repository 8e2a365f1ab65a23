"""Requests that may have crashed engines: each is run apart from the others, and none gets a third replica."""

from collections.abc import Callable, Collection, Iterable, Sequence

from vllm_omni_plugin.errors import NoReplicaError
from vllm_omni_plugin.orchestrator.dispatch.hold_queue import HoldQueue
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.stage_run import Accepted, Loss, StageRun

MAX_ISOLATION_WAIT_S = 10.0
"""Seconds that a suspect waits for a replica of its own. If many wait, most of them are innocent."""
CLEARING_OUTPUTS = 4
"""New outputs of a replica that end a suspect's isolation there. One is not enough: what an engine has computed ahead
is lost with it, so of two engines that crash at the same token the second may have sent more."""


class Suspects:
    """The suspects of one stage. Lives on the orchestrator's loop.

    When an engine crashes, or sends unusable messages, each request in flight there is a suspect, to its end or until
    another request is found to be the culprit. A suspect is *isolated*: at its next replica, until it has had some new
    outputs, there is no other suspect if possible, and no new request.

    If a second replica crashes, the requests that were in flight on both are candidates. If one candidate alone was
    isolated there, or if there is one candidate alone, it is the culprit: it fails with `StageRun.query_of_death`, and
    both losses count for it only. The other candidates get no third replica either, whether a culprit was found or not.
    They may go back to the replicas that crashed under them.

    Args:
        wake_at: asks for calls of `take_ready` at this time, in monotonic seconds.

    Attributes:
        isolated: the suspects that are isolated at a replica, by its id; no set is empty.
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
        self._queue = HoldQueue(MAX_ISOLATION_WAIT_S, wake_at)
        # Runs that waited in the queue and are suspects no more.
        self._cleared: dict[StageRun, None] = {}
        self.isolated: dict[int, set[StageRun]] = {}

    def __len__(self) -> int:
        """How many suspects wait for a replica of their own."""
        return len(self._queue) + len(self._cleared)

    def avoided_replicas(self, run: StageRun, refused: Collection[int] = ()) -> Collection[int]:
        """Ids of the replicas to which a run does not go while others serve.

        A run avoids replicas where suspects are isolated. A suspect also avoids the replicas that crashed under it, and
        all on their machines if others are left: a broken replica would make it the culprit. A run under which two
        replicas have crashed avoids all others.

        Args:
            refused: ids of replicas that have refused the run.

        Raises:
            NoReplicaError: no replica serves to which the run may go.
        """
        serving = {member.replica_id for member in self._pool.serving}
        others = serving.difference(member.replica_id for member in self._allowed(run))
        if run.confined_to and others == serving:
            raise NoReplicaError("None of the replicas that crashed under this request serves again.")
        isolating, losses = set(self.isolated), run.unexplained_crashes
        if losses:
            crashed = {loss.replica.replica_id for loss in losses}
            machines = {loss.replica.machine for loss in losses}
            beside = {member.replica_id for member in self._pool.serving if member.machine in machines}
            wishes = [isolating | crashed | beside, isolating | crashed, isolating]
        else:
            # A suspect that stays isolated to its end would keep its replica from all others for as long.
            wishes = [{each for each in isolating if not all(map(_has_enough_outputs, self.isolated[each]))}]
        for wish in (*wishes, set[int]()):
            avoided = others.union(wish, refused)
            if not serving <= avoided:
                return avoided
        return others

    def has_replica_for(self, run: StageRun) -> bool:
        return bool(self._allowed(run))

    def hold(self, run: StageRun) -> bool:
        """Let a suspect wait if suspects are isolated at all replicas that it may go to. Returns whether it waits."""
        must_wait = self._all_isolating(self._allowed(run))
        if not self._needs_isolation(run) or not (must_wait or len(self._queue)):
            return False
        if not must_wait:
            # The runs in front of it may have to wait, since they may not go everywhere.
            self._wake_at(self._clock())
        return self._queue.hold(run, self._clock())

    def assigned(self, run: StageRun, member: PoolMember) -> None:
        """A suspect goes to a replica."""
        if self._needs_isolation(run):
            self.isolated.setdefault(member.replica_id, set()).add(run)

    def count_outputs(self, member: PoolMember, accepted: Iterable[Accepted]) -> None:
        """New outputs came from a replica where suspects are isolated."""
        for run, _ in accepted:
            if run in self.isolated.get(member.replica_id, ()):
                run.outputs_since_crash += 1
                if not self._needs_isolation(run):
                    self.remove(run)

    def engine_crashed(self, runs: Iterable[StageRun], loss: Loss) -> None:
        """An engine crashed with these runs in flight: record the suspects, and the culprit if it is known now."""
        sent = [run for run in runs if run.sent]
        twice = [run for run in sent if self._crashed_before(run, loss)]
        isolated = self.isolated.get(loss.replica.replica_id, ())
        candidates = [run for run in twice if run in isolated] or twice
        for run in sent:
            if loss.others and run.has_output and run not in isolated:
                run.excused_losses.append(loss)
            run.crash_losses.append(loss)
            run.outputs_since_crash = 0
        # If other heads had requests there, one of those is as likely as a run that has delivered something.
        if len(candidates) == 1 and not (loss.others and candidates[0].produced):
            self._set_culprit(candidates[0])

    def replica_lost(self, member: PoolMember) -> None:
        """A replica is lost; the suspects that were isolated there must be isolated again."""
        self.isolated.pop(member.replica_id, None)

    def remove(self, run: StageRun) -> None:
        """A suspect's isolation is over, or it has ended: the next suspect may go to its replica."""
        self._queue.remove(run)
        self._cleared.pop(run, None)
        if run.replica_id in self.isolated:
            isolated = self.isolated[run.replica_id]
            isolated.discard(run)
            if not isolated:
                del self.isolated[run.replica_id]
        if len(self._queue):
            self._wake_at(self._clock())

    def take_ready(self) -> StageRun | None:
        """Remove and return the next run that need not wait any more, in order. To be called until there is none.

        A replica is free for it, or another run is the culprit, or it has waited long enough.
        """
        if self._cleared:
            run = next(iter(self._cleared))
            del self._cleared[run]
            return run
        if not self._all_isolating(self._pool.serving):
            for run in self._queue:
                if not self._all_isolating(self._allowed(run)):
                    self._queue.remove(run)
                    return run
        return self._queue.take_overdue(self._clock())

    def _needs_isolation(self, run: StageRun) -> bool:
        losses = run.unexplained_crashes
        # A stage with one replica would serve nothing else meanwhile, so it has to crash twice.
        if len(losses) <= (len(self._pool.members) == 1):
            return False
        return len({loss.replica for loss in losses}) > 1 or not _has_enough_outputs(run)

    def _allowed(self, run: StageRun) -> Sequence[PoolMember]:
        """The replicas that serve and to which a run may go."""
        confined_to = run.confined_to
        if not confined_to:
            return self._pool.serving
        return [member for member in self._pool.serving if member in confined_to]

    def _all_isolating(self, members: Sequence[PoolMember]) -> bool:
        """Whether suspects are isolated at all of these replicas; False without replicas: the run is held then."""
        # Comparing the numbers is enough most often.
        count = len(members)
        return 0 < count <= len(self.isolated) and all(member.replica_id in self.isolated for member in members)

    def _crashed_before(self, run: StageRun, loss: Loss) -> bool:
        """Whether an earlier crash counts against a run: one of another replica, if there is another one."""
        losses = run.unexplained_crashes
        return any(before.replica is not loss.replica for before in losses) or bool(losses and not self._pool.serving)

    def _set_culprit(self, culprit: StageRun) -> None:
        for loss in culprit.unexplained_crashes:
            loss.culprit = culprit
        # Runs that are not suspected of another crash neither wait nor need a replica of their own.
        for run in [run for run in self._queue if not self._needs_isolation(run)]:
            self._queue.remove(run)
            self._cleared[run] = None
        for isolated in [*self.isolated.values()]:
            for run in [run for run in isolated if not self._needs_isolation(run)]:
                self.remove(run)


def _has_enough_outputs(run: StageRun) -> bool:
    return run.outputs_since_crash >= CLEARING_OUTPUTS
