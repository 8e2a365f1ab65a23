"""Requests that may have crashed engines: they are kept apart from each other, and none gets a third engine."""

from collections.abc import Collection, Iterable, Sequence
from math import inf

from vllm_omni_plugin.errors import NoReplicaError
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.stage_run import Loss, StageRun

MAX_APART_WAIT_S = 10.0
"""Seconds that a suspect waits for a replica without others. If many wait, most of them are innocent."""
CLEARING_TOKENS = 4
"""Delivered tokens after which a request need not be kept apart. One is not enough: what an engine has computed ahead
is lost with it, so of two engines that crash at the same token the second may have sent more."""


class Suspects:
    """The suspects of one stage: requests in flight where an engine crashed by itself, or sent unusable messages.

    Most engines that crash because of a request do so at its beginning. So suspects with few delivered tokens are kept
    *apart*: at the next replica of each there is no other one, if possible, until it has `CLEARING_TOKENS`. After a
    second crash a suspect is kept apart to its end.

    Of the requests that were in flight at crashes of two replicas, the only one that was apart at the second one is the
    culprit, or else the only one at all: it ends with `StageRun.query_of_death`, and both losses count for it only. The
    others may only go back to the replicas that crashed under them, whether there is a culprit or not.

    Attributes:
        apart: the suspects that are kept apart at a replica, by its id; no set is empty.
    """

    def __init__(self, pool: StagePool) -> None:
        self._pool = pool
        self.apart: dict[int, set[StageRun]] = {}

    def engine_crashed(self, runs: Iterable[StageRun], loss: Loss) -> None:
        """An engine crashed with these runs in flight: record the suspects, and the culprit if it is known now."""
        sent = [run for run in runs if run.sent]
        twice = [run for run in sent if self._crashed_before(run, loss)]
        apart = self.apart.get(loss.replica.replica_id, ())
        candidates = [run for run in twice if run in apart] or twice
        for run in sent:
            run.crash_losses.append(loss)
            run.apart_until = self._apart_until(run)
        # If other heads had requests there, one of those is as likely as a run that has delivered something.
        if len(candidates) == 1 and not (loss.others and candidates[0].produced):
            for each in candidates[0].unexplained_crashes:
                each.culprit = candidates[0]
            for replica_id in [*self.apart]:
                self.update(replica_id)

    def allowed(self, run: StageRun) -> Sequence[PoolMember]:
        """The serving replicas to which a run may go: after two crashes only those it has been at."""
        confined_to = run.confined_to if run.crash_losses else ()
        if not confined_to:
            return self._pool.serving
        return [member for member in self._pool.serving if member in confined_to]

    def avoided(self, run: StageRun, refused: Collection[int]) -> Collection[int]:
        """Ids of the replicas to which a suspect does not go while others serve. `refused` are those that refuse it.

        It avoids replicas where suspects are apart, those that crashed under it, and all on their machines: a broken
        replica would make it the culprit.

        Raises NoReplicaError if none serves to which the run may go.
        """
        serving = {member.replica_id for member in self._pool.serving}
        others = serving.difference(member.replica_id for member in self.allowed(run))
        if run.confined_to and others == serving:
            raise NoReplicaError("None of the replicas that crashed under this request serves again.")
        apart, crashed = set(self.apart), {loss.replica.replica_id for loss in run.unexplained_crashes}
        machines = {loss.replica.machine for loss in run.unexplained_crashes}
        beside = {member.replica_id for member in self._pool.serving if member.machine in machines}
        last = apart if run.must_be_apart else crashed
        for wish in (apart | crashed | beside, apart | crashed, last, set[int]()):
            avoided = others.union(wish, refused)
            if not serving <= avoided:
                return avoided
        return others

    def must_wait(self, run: StageRun) -> bool:
        """Whether suspects are apart at all replicas that a suspect may go to. False if it may go to none: it is held
        then."""
        if not run.must_be_apart:
            return False
        allowed = self.allowed(run)
        return 0 < len(allowed) <= len(self.apart) and all(member.replica_id in self.apart for member in allowed)

    def assigned(self, run: StageRun, member: PoolMember) -> None:
        """A suspect goes to a replica."""
        if run.must_be_apart:
            self.apart.setdefault(member.replica_id, set()).add(run)

    def update(self, replica_id: int) -> bool:
        """Suspects at a replica have got tokens, ended or moved. Returns whether none is apart there any more."""
        left = {
            run
            for run in self.apart.pop(replica_id, ())
            if run.replica_id == replica_id and run.must_be_apart and not run.ended
        }
        if left:
            self.apart[replica_id] = left
        return not left

    def _apart_until(self, run: StageRun) -> float:
        """How many tokens clear a run of its crashes: never after two replicas, none in a stage of one after one."""
        losses = run.unexplained_crashes
        if len({loss.replica for loss in losses}) > 1:
            return inf
        if len(losses) > 1:
            return len(run.produced) + CLEARING_TOKENS
        # A stage with one replica would serve nothing else meanwhile, so it has to crash twice.
        usable = [member for member in self._pool.members if not member.other_generation]
        return 0 if len(usable) == 1 else CLEARING_TOKENS

    def _crashed_before(self, run: StageRun, loss: Loss) -> bool:
        """Whether an earlier crash counts against a run: one of another replica, if there is another one."""
        losses = run.unexplained_crashes
        return any(before.replica is not loss.replica for before in losses) or bool(losses and not self._pool.serving)
