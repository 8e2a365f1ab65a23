"""Requests that engines may have died of: each is tried apart from all others, and a second crash there convicts it."""

from collections.abc import Callable, Collection, Iterable

from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.dispatch.held_requests import HeldRequests
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.stage_run import Loss, StageRun

logger = init_logger(__name__)

WAIT_S = 10.0
"""Seconds that a suspect waits for a replica without another one. Where many wait, most of them are innocent."""


class Suspects:
    """The suspects of one stage. Lives on the orchestrator's loop.

    When an engine crashes, or says what cannot be used, each request that has had no output of it may be the cause.
    These are the suspects. Each is tried at another replica until it has output, if possible where no other suspect is
    and where no new request goes meanwhile. If that replica crashes, too, and nobody else was without output there, the
    request fails, and both losses are its doing and nobody else's.

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
        self._line = HeldRequests(WAIT_S, wake_at)
        self.tries: dict[int, set[StageRun]] = {}

    def __len__(self) -> int:
        """How many wait for a replica without another one."""
        return len(self._line)

    def avoided(self, run: StageRun) -> Collection[int]:
        """Ids of the replicas to which a request does not go if others serve.

        These are where suspects are tried, and for a suspect also those that it may have crashed: one broken machine
        would make it guilty.
        """
        tried = self.tries.keys()
        if not run.suspicions:
            return tried
        avoided = tried | {loss.replica_id for loss in run.suspicions}
        return avoided if any(member.replica_id not in avoided for member in self._pool.serving) else tried

    def hold(self, run: StageRun) -> bool:
        """Let a suspect wait if others are tried at all replicas that serve. Returns whether it waits."""
        must_wait = self._is_apart(run) and (len(self._line) > 0 or self._all_tried())
        return must_wait and self._line.hold(run, self._clock())

    def begin(self, run: StageRun, member: PoolMember) -> None:
        """A suspect is sent to a replica."""
        if self._is_apart(run):
            self.tries.setdefault(member.replica_id, set()).add(run)

    def engine_failed(self, runs: Iterable[StageRun], loss: Loss) -> None:
        """An engine failed with these requests in flight. Who may have caused it is noted with them and the loss."""
        unanswered = [run for run in runs if run.sent and not run.began]
        if len(unanswered) == 1 and self._is_guilty(unanswered[0], loss):
            self._blame(unanswered[0], loss)
            return
        for run in unanswered:
            run.suspicions.append(loss)

    def lost(self, member: PoolMember) -> None:
        """A replica is lost; who was tried there is to be tried again."""
        self.tries.pop(member.replica_id, None)

    def clear(self, run: StageRun) -> None:
        """A suspect has had output: it is as good as any other request."""
        run.suspicions.clear()
        self.forget(run)

    def forget(self, run: StageRun) -> None:
        """A suspect is none any more, or has ended: the next one may go where it was."""
        self._line.remove(run)
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

        Because a replica is free for it, or because it has waited long enough.
        """
        return self._line.take_overdue(self._clock()) if self._all_tried() else self._line.take()

    def _is_apart(self, run: StageRun) -> bool:
        # A stage with one replica would serve nobody else meanwhile, so it crashes once more before that.
        return len(run.suspicions) > (len(self._pool.members) == 1)

    def _all_tried(self) -> bool:
        # Where no replica serves at all suspects wait as everybody else does. Most often the lengths say all.
        serving = self._pool.serving
        return 0 < len(serving) <= len(self.tries) and all(member.replica_id in self.tries for member in serving)

    def _is_guilty(self, run: StageRun, loss: Loss) -> bool:
        elsewhere = any(before.replica_id != loss.replica_id for before in run.suspicions)
        return elsewhere or bool(run.suspicions and not self._pool.serving)

    def _blame(self, run: StageRun, loss: Loss) -> None:
        for each in (*run.suspicions, loss):
            each.culprit = run
        logger.error("Request %s gets no third replica: two engines seem to have died of it.", run.request_id)
