"""How fast requests of lost replicas go on elsewhere: a budget that all stages of a head share."""

import asyncio
from collections.abc import Callable

from vllm_omni_plugin.orchestrator.metrics import OrchestratorMetrics
from vllm_omni_plugin.orchestrator.stage_run import StageRun

MOVES_PER_S = 256.0
"""Moves per second in the long run. For each a prompt is computed once more, which slows down all others there."""
MOVES_AT_ONCE = 1024
"""Moves that may follow each other at once after a quiet time: what several replicas have in flight."""


class MoveLine:
    """Lets so many requests move per second; those beyond wait in order. Lives on the orchestrator's loop.

    Args:
        clock: monotonic seconds.
        metrics: what it counts.
    """

    def __init__(self, clock: Callable[[], float], metrics: OrchestratorMetrics) -> None:
        self._clock = clock
        self._metrics = metrics
        self._line: dict[StageRun, Callable[[StageRun], None]] = {}
        self._budget = float(MOVES_AT_ONCE)
        self._counted_at = clock()
        self._going = False
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def add(self, run: StageRun, dispatch: Callable[[StageRun], None]) -> None:
        """Let a request move when its turn comes, which may be at once."""
        self._line[run] = dispatch
        self._metrics.moves_waiting += 1
        self._go()

    def remove(self, run: StageRun) -> None:
        """A request does not move any more. Nothing to do if it does not wait."""
        if self._line.pop(run, None) is not None:
            self._metrics.moves_waiting -= 1

    def close(self) -> None:
        """Stop the timer for good. Idempotent."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _go(self) -> None:
        # The next replica may turn out to be dead, too; then its requests come in here and have their turn below.
        if self._going:
            return
        self._going = True
        try:
            self._count()
            while self._line and self._budget >= 1.0:
                self._budget -= 1.0
                run = next(iter(self._line))
                dispatch = self._line[run]
                self.remove(run)
                dispatch(run)
        finally:
            self._going = False
            if self._line and self._timer is None and not self._closed:
                wait = max(0.0, 1.0 - self._budget) / MOVES_PER_S
                self._timer = asyncio.get_running_loop().call_later(wait, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self._go()

    def _count(self) -> None:
        now = self._clock()
        self._budget = min(MOVES_AT_ONCE, self._budget + (now - self._counted_at) * MOVES_PER_S)
        self._counted_at = now
