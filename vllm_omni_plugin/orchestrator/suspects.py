"""Requests that engines may have died of: none gets a third replica, and each is tried apart from the others."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.held_requests import HeldRequests
from vllm_omni_plugin.orchestrator.metrics import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.stage_run import Loss, StageRun

logger = init_logger(__name__)

WAIT_S = 10.0
"""Seconds that a suspect waits for a replica without another one. Where many wait, most of them are innocent."""
DIED_TOGETHER_S = 0.02
"""An engine whose death is noticed so soon after a suspect was sent to it was dying already, of whatever cause."""


class _Try(NamedTuple):
    member: PoolMember
    since: float


class Suspects:
    """The suspects of one stage. Lives on the orchestrator's loop.

    When an engine dies, or says what cannot be used, each request that has had no output of it may be the cause. These
    are the suspects. Each is tried at another replica, if possible where no other suspect is, until it has output: so a
    second death has one possible cause. That request fails, and both losses are its doing and nobody else's.

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
        self._clock = clock
        self._dispatch = dispatch
        self._metrics = metrics
        self._line = HeldRequests(WAIT_S, clock, self._waited)
        self._tries: dict[StageRun, _Try] = {}

    @property
    def avoided(self) -> frozenset[PoolMember]:
        """Replicas to which no suspect goes now, because another one is tried there; none if that would be all."""
        busy = self._busy()
        return frozenset() if busy.issuperset(self._pool.serving) else busy

    def hold(self, run: StageRun) -> bool:
        """Let a suspect wait if others are tried at all replicas that serve. Returns whether it waits."""
        waits = self._must_wait() and self._line.hold(run)
        self._metrics.moves_waiting += waits
        return waits

    def begin(self, run: StageRun, member: PoolMember) -> None:
        """A suspect is sent to a replica."""
        self._tries[run] = _Try(member, self._clock())

    def engine_failed(self, runs: Iterable[StageRun], loss: Loss) -> None:
        """An engine failed with these requests in flight. Who may have caused it is noted with them and the loss."""
        tried = [run for run in runs if run in self._tries]
        if len(tried) == 1:
            if self._clock() - self._tries[tried[0]].since >= DIED_TOGETHER_S:
                self._blame(tried[0], loss)
            return
        for run in tried or runs:
            if run.charge is not None and not run.charge.began:
                run.suspicions.append(loss)

    def lost(self, runs: Iterable[StageRun]) -> None:
        """The replica of these requests is lost; who was tried there is to be tried again."""
        for run in runs:
            self._tries.pop(run, None)
        self.let_go()

    def clear(self, run: StageRun) -> None:
        """A suspect has had output: it is as good as any other request."""
        run.suspicions.clear()
        self.forget(run)

    def forget(self, run: StageRun) -> None:
        """A suspect is none any more, or has ended: the next one may go where it was."""
        self._metrics.moves_waiting -= self._line.remove(run)
        self._tries.pop(run, None)
        self.let_go()

    def let_go(self) -> None:
        """Dispatch those that wait and need not any longer, in order."""
        while not self._must_wait() and (run := self._line.take()) is not None:
            self._waited(run)

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        self._line.close()

    def _busy(self) -> frozenset[PoolMember]:
        return frozenset(a_try.member for a_try in self._tries.values())

    def _must_wait(self) -> bool:
        # Where no replica serves at all suspects wait as everybody else does.
        serving = self._pool.serving
        return bool(serving and self._tries) and self._busy().issuperset(serving)

    def _waited(self, run: StageRun) -> None:
        self._metrics.moves_waiting -= 1
        self._dispatch(run)

    def _blame(self, run: StageRun, loss: Loss) -> None:
        for each in (*run.suspicions, loss):
            each.culprit = run
        logger.error("Request %s gets no third replica: two engines seem to have died of it.", run.request_id)
