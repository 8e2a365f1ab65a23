"""How fast requests leave a stage's queue, how long engines take to begin them, and what of prompts was cached."""

from collections.abc import Callable
from math import exp

_MEMORY_S = 30.0
"""Seconds after which what was seen weighs 1/e: of time with a queue in the rate, of any time in the share.

In the rate it fades only when a request leaves the queue. Time in which none does counts in full: 5 minutes of it make
the rate about ten times lower, and nothing makes it vanish.
"""
_IN_ENGINE_MEMORY_S = 5.0
"""The same of the times in engines, which change as quickly as the load does."""
_DIFFERENCES = 4
"""How many mean differences above the mean almost all lie, see `StageFlow.first_output_s`."""


class StageFlow:
    """Sums over the requests of a stage, recent ones weighing more. O(1) for each request.

    A request is in the queue from when it is sent to a replica until its first output. The rate is measured only while
    some are, since without them it would be that at which requests come. What is not sent yet is not known here.

    Written by the orchestrator's loop; any thread may read the properties.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queued = 0
        # First outputs, the seconds up to the last one in which there was a queue, those since then, and the time up to
        # which they are counted. Replaced as one, for the sake of other threads.
        self._left = (0.0, 0.0, 0.0, 0.0)
        # Tokens that were cached, of how many, and when that was said last.
        self._cached = (0.0, 0.0, 0.0)
        # Requests, their seconds in engines, the differences of these from the mean, and when the last was counted.
        self._in_engine = (0.0, 0.0, 0.0, 0.0)

    def sent(self, now: float) -> None:
        """An attempt is sent to a replica."""
        if not self._queued:
            self._left = (*self._left[:3], now)
        self._queued += 1

    def first_output(
        self, now: float, prompt_tokens: int, cached_tokens: int | None, in_engine_s: float | None = None
    ) -> None:
        """Its first output came.

        Args:
            now: the time.
            prompt_tokens: of its prompt.
            cached_tokens: those that the engine had cached; None if it did not say.
            in_engine_s: seconds since it was sent to the engine; None where that is no measure.
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
        """So many ended without an output: given up by their clients, refused, or lost with their replica.

        Args:
            now: the time.
            attempts: how many.
            in_engine_s: seconds since it was sent to the engine; None where that is no measure.
        """
        self._left = self._left_by(now)
        self._queued -= attempts
        # The first output would have taken longer than that.
        if in_engine_s is not None and in_engine_s > self.first_output_s:
            self._note_in_engine(now, in_engine_s)

    @property
    def queued(self) -> int:
        """Attempts that are charged to a replica and have no output yet."""
        return self._queued

    @property
    def leaving_rate(self) -> float | None:
        """Requests that leave the queue per second of the time in which there is one; None before the first."""
        left, seconds, since, _ = self._left_by(self._clock()) if self._queued else self._left
        return left / (seconds + since) if left and seconds + since else None

    @property
    def hit_ratio(self) -> float | None:
        """Share of prompt tokens that engines had cached, 0 to 1; None before they have said so of any."""
        cached, asked, _ = self._cached
        return cached / asked if asked else None

    @property
    def first_output_s(self) -> float:
        """Seconds within which almost all requests have their first output once an engine has got them; 0: not known.

        The mean and four times the mean difference from it, as TCP bounds the time of an answer (Jacobson, Congestion
        Avoidance and Control, SIGCOMM 1988).
        """
        requests, seconds, differences, _ = self._in_engine
        return (seconds + _DIFFERENCES * differences) / requests if requests else 0.0

    def _note_in_engine(self, now: float, in_engine_s: float) -> None:
        requests, seconds, differences, then = self._in_engine
        kept = exp((then - now) / _IN_ENGINE_MEMORY_S)
        requests, seconds = requests * kept + 1, seconds * kept + in_engine_s
        differences = differences * kept + abs(in_engine_s - seconds / requests)
        self._in_engine = (requests, seconds, differences, now)

    def _left_by(self, now: float) -> tuple[float, float, float, float]:
        left, seconds, since, then = self._left
        return left, seconds, since + max(0.0, now - then), now
