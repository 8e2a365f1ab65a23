"""Measured flow of a stage: how fast requests get their first output, and how much of their prompts was cached."""

from collections.abc import Callable
from math import exp

_MEMORY_S = 30.0
"""Seconds after which an observation weighs 1/e: of time with a queue in the rate, of any time in the hit ratio.

Observations of the rate fade only when a request leaves the queue. Time in which none leaves counts in full: after 5
minutes of it the rate is about ten times lower, and it never becomes zero.
"""
_IN_ENGINE_MEMORY_S = 5.0
"""The same for times in engines, which change as quickly as the load."""
_DEVIATIONS = 4
"""Mean deviations above the mean that cover almost all times, see `StageFlow.first_output_s`."""


class StageFlow:
    """Sums over the requests of a stage, recent ones weighing more. O(1) for each request.

    A request is in the queue from its charge to a replica until its first output. The rate is measured only while there
    is a queue: without one it would be the rate at which requests come.

    Written by the orchestrator's loop; any thread may read the properties.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queued = 0
        # First outputs; seconds with a queue, up to the last first output; seconds with a queue since that output; and
        # the time up to which they are counted. These tuples are replaced as a whole, since other threads read them.
        self._left = (0.0, 0.0, 0.0, 0.0)
        # Cached prompt tokens, all prompt tokens, and the time of the last report.
        self._cached = (0.0, 0.0, 0.0)
        # Requests, their seconds in engines, the deviations from the mean, and the time of the last one.
        self._in_engine = (0.0, 0.0, 0.0, 0.0)

    def entered(self, now: float) -> None:
        """A request enters the queue."""
        if not self._queued:
            self._left = (*self._left[:3], now)
        self._queued += 1

    def first_output(
        self, now: float, prompt_tokens: int, cached_tokens: int | None, in_engine_s: float | None = None
    ) -> None:
        """An attempt's first output came.

        Cached tokens are None if the engine did not report them, `in_engine_s` if it is not to be counted.
        """
        left, seconds, since, _ = self._left_by(now)
        kept = exp(-since / _MEMORY_S)
        self._left = (left * kept + 1, seconds * kept + since, 0.0, now)
        self._queued -= 1
        if cached_tokens is not None:
            cached, asked, then = self._cached
            kept = exp((then - now) / _MEMORY_S)
            self._cached = (cached * kept + cached_tokens, asked * kept + prompt_tokens, now)
        if in_engine_s is not None:
            self._note_in_engine(now, in_engine_s)

    def dropped(self, now: float, attempts: int = 1, in_engine_s: float | None = None) -> None:
        """Attempts ended without an output. For `in_engine_s` see `first_output`."""
        self._left = self._left_by(now)
        self._queued -= attempts
        # The first output would have taken longer.
        if in_engine_s is not None and in_engine_s > self.first_output_s:
            self._note_in_engine(now, in_engine_s)

    @property
    def queued(self) -> int:
        return self._queued

    @property
    def leaving_rate(self) -> float | None:
        """Requests that leave the queue per second with a queue; None before the first."""
        left, seconds, since, _ = self._left_by(self._clock()) if self._queued else self._left
        return left / (seconds + since) if left and seconds + since else None

    @property
    def hit_ratio(self) -> float | None:
        """Share of prompt tokens that engines had cached, 0 to 1; None before the first report."""
        cached, asked, _ = self._cached
        return cached / asked if asked else None

    @property
    def first_output_s(self) -> float:
        """Seconds within which almost all requests get their first output, once an engine has got them; 0: not known.

        The mean and four mean deviations, as TCP bounds a round-trip time (Jacobson, Congestion Avoidance and Control,
        SIGCOMM 1988).
        """
        requests, seconds, deviations, _ = self._in_engine
        return (seconds + _DEVIATIONS * deviations) / requests if requests else 0.0

    def _note_in_engine(self, now: float, in_engine_s: float) -> None:
        requests, seconds, deviations, then = self._in_engine
        kept = exp((then - now) / _IN_ENGINE_MEMORY_S)
        requests, seconds = requests * kept + 1, seconds * kept + in_engine_s
        deviations = deviations * kept + abs(in_engine_s - seconds / requests)
        self._in_engine = (requests, seconds, deviations, now)

    def _left_by(self, now: float) -> tuple[float, float, float, float]:
        left, seconds, since, then = self._left
        return left, seconds, since + max(0.0, now - then), now
