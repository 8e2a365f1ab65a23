"""Requests that engines may have died of: none gets a third replica, and each is tried apart from the others."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.metrics import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.stage_run import Loss, StageRun

logger = init_logger(__name__)

TRY_S = 10.0
"""Seconds without output after which a suspect no longer keeps others from its replica: it may only be slow."""
DIED_TOGETHER_S = 0.02
"""An engine whose death is noticed so soon after a suspect was sent to it was dying already, of whatever cause."""


class _Try(NamedTuple):
    member: PoolMember
    since: float


class Suspects:
    """The suspects of one stage. Lives on the orchestrator's loop.

    When an engine dies, each request that has had no output of it may be the cause. These are the suspects. Each is
    sent to another replica where no other suspect waits for output, so that a second death has one possible cause: that
    request fails, and the two losses are its doing and nobody else's. The first output clears a suspect.

    Args:
        pool: the stage's replicas.
        clock: monotonic seconds.
        dispatch: sends a request that has waited here.
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
        self._line: dict[StageRun, None] = {}
        self._tries: dict[StageRun, _Try] = {}
        self._timer: asyncio.TimerHandle | None = None

    def engine_died(self, runs: Iterable[StageRun], loss: Loss) -> None:
        """An engine died with these requests in flight. Who may have caused that is noted with them and the loss."""
        tried = [run for run in runs if run in self._tries]
        if not tried:
            for run in runs:
                if run.charge is not None and not run.charge.began:
                    run.suspicions.append(loss)
        elif len(tried) > 1:
            for run in tried:
                run.suspicions.append(loss)
        elif self._clock() - self._tries[tried[0]].since >= DIED_TOGETHER_S:
            self._convict(tried[0], loss)

    @property
    def must_wait(self) -> bool:
        """Whether a suspect has to wait. Where no replica serves at all it waits as everybody else does."""
        serving = self._pool.serving
        return bool(serving) and self.busy().issuperset(serving)

    def busy(self) -> frozenset[PoolMember]:
        """Replicas to which no further suspect may go now."""
        now = self._clock()
        return frozenset(a_try.member for a_try in self._tries.values() if now - a_try.since < TRY_S)

    def wait(self, run: StageRun) -> None:
        """A suspect has to wait: it is dispatched when it need not any longer."""
        self._line[run] = None
        self._metrics.moves_waiting += 1
        self._set_timer()

    def begin(self, run: StageRun, member: PoolMember) -> None:
        """A suspect goes to a replica."""
        self._tries[run] = _Try(member, self._clock())

    def clear(self, run: StageRun) -> None:
        """A suspect has had output: it is as good as any other request."""
        run.suspicions.clear()
        self.forget((run,))

    def forget(self, runs: Sequence[StageRun]) -> None:
        """These requests have ended or lost their replica; others may go where they were."""
        for run in runs:
            self._tries.pop(run, None)
            if run in self._line:
                self._leave_line(run)
        self.let_go()

    def let_go(self) -> None:
        """Dispatch those that wait and need not any longer, in order."""
        while self._line and not self.must_wait:
            run = next(iter(self._line))
            self._leave_line(run)
            self._dispatch(run)
        self._set_timer()

    def close(self) -> None:
        """Stop the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def _convict(self, run: StageRun, loss: Loss) -> None:
        for each in (*run.suspicions, loss):
            each.culprit = run
        logger.error("Request %s is given no further replica: its engines died of it, or so it seems.", run.request_id)

    def _leave_line(self, run: StageRun) -> None:
        del self._line[run]
        self._metrics.moves_waiting -= 1

    def _set_timer(self) -> None:
        if self._line and self._timer is None:
            first = min((a_try.since for a_try in self._tries.values()), default=0.0)
            rest = max(0.0, first + TRY_S - self._clock())
            self._timer = asyncio.get_running_loop().call_later(rest, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.let_go()
