"""Requests that engines may have died of: none gets a third replica, and each is tried apart from the others."""

import asyncio
from collections.abc import Callable, Iterable
from typing import NamedTuple

from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.metrics import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.stage_run import Loss, StageRun

logger = init_logger(__name__)

TRY_S = 10.0
"""Seconds that a try lasts at most. Without output until then, the request is slow or waits in the engine's queue."""
DIED_TOGETHER_S = 0.02
"""An engine whose death is noticed so soon after a suspect was sent to it was dying already, of whatever cause."""


class _Try(NamedTuple):
    run: StageRun
    since: float


class Suspects:
    """The suspects of one stage. Lives on the orchestrator's loop.

    When an engine dies, or says what cannot be used, each request that has had no output of it may be the cause. These
    are the suspects. Each is tried at another replica, where no other suspect is tried at the same time, until it has
    output: so a second death has one possible cause. That request fails, and both losses are its doing and nobody
    else's.

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
        self._tries: dict[PoolMember, _Try] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def must_wait(self) -> bool:
        """Whether a suspect has to wait. Where no replica serves at all it waits as everybody else does."""
        serving = self._pool.serving
        return bool(serving) and self.busy().issuperset(serving)

    def busy(self) -> frozenset[PoolMember]:
        """Replicas at which a suspect is tried now."""
        now = self._clock()
        return frozenset(member for member, a_try in self._tries.items() if now - a_try.since < TRY_S)

    def wait(self, run: StageRun) -> None:
        """A suspect has to wait: it is dispatched when it need not any longer."""
        self._line[run] = None
        self._metrics.moves_waiting += 1
        self._set_timer()

    def begin(self, run: StageRun, member: PoolMember) -> None:
        """A suspect goes to a replica that is not busy."""
        self._tries[member] = _Try(run, self._clock())

    def engine_failed(self, member: PoolMember, runs: Iterable[StageRun], loss: Loss) -> None:
        """An engine failed with these requests in flight. Who may have caused it is noted with them and the loss."""
        a_try = self._tries.get(member)
        lasted = TRY_S if a_try is None else self._clock() - a_try.since
        if a_try is None or lasted >= TRY_S:
            for run in runs:
                if run.charge is not None and not run.charge.began:
                    run.suspicions.append(loss)
        elif lasted >= DIED_TOGETHER_S:
            for each in (*a_try.run.suspicions, loss):
                each.culprit = a_try.run
            logger.error("Request %s gets no third replica: two engines seem to have died of it.", a_try.run.request_id)

    def lost(self, member: PoolMember) -> None:
        """A replica is lost; what was tried there is to be tried again."""
        self._tries.pop(member, None)
        self.let_go()

    def clear(self, run: StageRun) -> None:
        """A suspect has had output: it is as good as any other request."""
        run.suspicions.clear()
        self.forget(run)

    def forget(self, run: StageRun) -> None:
        """A suspect is none any more, or has ended: the next one may go where it was."""
        if run in self._line:
            self._leave_line(run)
        for member, a_try in self._tries.items():
            if a_try.run is run:
                del self._tries[member]
                break
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

    def _leave_line(self, run: StageRun) -> None:
        del self._line[run]
        self._metrics.moves_waiting -= 1

    def _set_timer(self) -> None:
        if self._line and self._timer is None:
            now = self._clock()
            rests = (a_try.since + TRY_S - now for a_try in self._tries.values())
            rest = min((rest for rest in rests if rest > 0), default=TRY_S)
            self._timer = asyncio.get_running_loop().call_later(rest, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.let_go()
