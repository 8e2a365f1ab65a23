"""Requests that engines may have died of: each is tried apart from all others, and a second crash there convicts it."""

import asyncio
from collections.abc import Callable, Collection, Iterable

from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.held_requests import HeldRequests
from vllm_omni_plugin.orchestrator.metrics import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.stage_run import Loss, StageRun

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
        clock: monotonic seconds.
        dispatch: sends a request that has waited here, to whichever replica.
        metrics: what it counts.
    """

    def __init__(
        self,
        pool: StagePool,
        clock: Callable[[], float],
        dispatch: Callable[[StageRun], None],
        metrics: OrchestratorMetrics,
    ) -> None:
        self._pool = pool
        self._dispatch = dispatch
        self._metrics = metrics
        self._line = HeldRequests(WAIT_S, clock, self._waited)
        # By the replica's id; none is empty.
        self._tries: dict[int, set[StageRun]] = {}

    def avoided(self, run: StageRun) -> Collection[int]:
        """Ids of the replicas to which a request does not go if others serve.

        These are where suspects are tried, and for a suspect also those that it may have crashed: one broken machine
        would make it guilty.
        """
        tried = self._tries.keys()
        if not run.suspicions:
            return tried
        avoided = tried | {loss.replica_id for loss in run.suspicions}
        return avoided if any(member.replica_id not in avoided for member in self._pool.serving) else tried

    def hold(self, run: StageRun) -> bool:
        """Let a suspect wait if others are tried at all replicas that serve. Returns whether it waits."""
        waits = self._is_apart(run) and (len(self._line) > 0 or self._all_tried()) and self._line.hold(run)
        self._metrics.moves_waiting += waits
        return waits

    def begin(self, run: StageRun, member: PoolMember) -> None:
        """A suspect is sent to a replica."""
        if self._is_apart(run):
            self._tries.setdefault(member.replica_id, set()).add(run)

    def engine_failed(self, runs: Iterable[StageRun], loss: Loss) -> None:
        """An engine failed with these requests in flight. Who may have caused it is noted with them and the loss."""
        unanswered = [run for run in runs if run.sent and run.charge is not None and not run.charge.began]
        if len(unanswered) == 1 and self._is_guilty(unanswered[0], loss):
            self._blame(unanswered[0], loss)
            return
        for run in unanswered:
            run.suspicions.append(loss)

    def lost(self, member: PoolMember) -> None:
        """A replica is lost; who was tried there is to be tried again."""
        self._tries.pop(member.replica_id, None)
        self.let_go()

    def clear(self, run: StageRun) -> None:
        """A suspect has had output: it is as good as any other request."""
        run.suspicions.clear()
        self.forget(run)

    def forget(self, run: StageRun) -> None:
        """A suspect is none any more, or has ended: the next one may go where it was."""
        self._metrics.moves_waiting -= self._line.remove(run)
        if run.replica_id in self._tries:
            tried = self._tries[run.replica_id]
            tried.discard(run)
            if not tried:
                del self._tries[run.replica_id]
        if len(self._line):
            # Not at once: where the next one is sent may turn out to be dead, with the rest of what is dealt with here.
            asyncio.get_running_loop().call_soon(self.let_go)

    def let_go(self) -> None:
        """Dispatch those that wait and need not any longer, in order."""
        while not self._all_tried() and (run := self._line.take()) is not None:
            self._waited(run)

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        self._line.close()

    def _is_apart(self, run: StageRun) -> bool:
        # A stage with one replica would serve nobody else meanwhile, so it crashes once more before that.
        return len(run.suspicions) > (len(self._pool.members) == 1)

    def _all_tried(self) -> bool:
        # Where no replica serves at all suspects wait as everybody else does. Most often the lengths say all.
        serving = self._pool.serving
        return 0 < len(serving) <= len(self._tries) and all(member.replica_id in self._tries for member in serving)

    def _is_guilty(self, run: StageRun, loss: Loss) -> bool:
        elsewhere = any(before.replica_id != loss.replica_id for before in run.suspicions)
        return elsewhere or bool(run.suspicions and not self._pool.serving)

    def _waited(self, run: StageRun) -> None:
        self._metrics.moves_waiting -= 1
        self._dispatch(run)

    def _blame(self, run: StageRun, loss: Loss) -> None:
        for each in (*run.suspicions, loss):
            each.culprit = run
        logger.error("Request %s gets no third replica: two engines seem to have died of it.", run.request_id)
