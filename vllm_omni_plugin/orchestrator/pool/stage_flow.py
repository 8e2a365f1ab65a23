"""Measured flow of a stage: how fast requests get their first output, and how much of their prompts was cached."""

from collections.abc import Callable
from math import exp

from msgspec import Struct

_MEMORY_S = 30.0
"""Seconds after which an observation weighs 1/e: of time with a queue in the rate, of any time in the hit ratio.

Observations of the rate fade only when a request leaves the queue. Time in which none leaves counts in full: after 5
minutes of it the rate is about ten times lower, and it never becomes zero.
"""
_IN_ENGINE_MEMORY_S = 5.0
"""The same for times in engines, which change as quickly as the load."""
_DEVIATIONS = 4
"""Mean deviations above the mean that cover almost all times, see `StageFlow.first_output_s`."""


# Replaced as a whole, since other threads read them. Structs, which take less time to create than named tuples.
class _Leaving(Struct, frozen=True, gc=False):
    """First outputs, and seconds with a queue: up to the last of them, and since then until `counted_until`."""

    first_outputs: float = 0.0
    queue_s: float = 0.0
    since_last_s: float = 0.0
    counted_until: float = 0.0

    def since_last_at(self, now: float) -> float:
        return self.since_last_s + max(0.0, now - self.counted_until)


class _Cached(Struct, frozen=True, gc=False):
    """Prompt tokens that were cached, those of all prompts, and the time of the last report."""

    cached_tokens: float = 0.0
    prompt_tokens: float = 0.0
    at: float = 0.0


class _InEngine(Struct, frozen=True, gc=False):
    """Requests, their seconds in engines, how far each was from the mean, and the time of the last one."""

    requests: float = 0.0
    seconds: float = 0.0
    deviations: float = 0.0
    at: float = 0.0


class StageFlow:
    """Sums over the requests of a stage, recent ones weighing more. O(1) for each request.

    A request is in the queue from its charge to a replica until its first output. The rate is measured only while there
    is a queue: without one it would be the rate at which requests come.

    Written by the orchestrator's loop; any thread may read the properties.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queued = 0
        self._leaving = _Leaving()
        self._cached = _Cached()
        self._in_engine = _InEngine()

    def entered(self, now: float) -> None:
        """A request enters the queue."""
        if not self._queued:
            before = self._leaving
            self._leaving = _Leaving(before.first_outputs, before.queue_s, before.since_last_s, now)
        self._queued += 1

    def first_output(
        self, now: float, prompt_tokens: int, cached_tokens: int | None, in_engine_s: float | None = None
    ) -> None:
        """An attempt's first output came.

        Cached tokens are None if the engine did not report them. `in_engine_s` are seconds since the attempt was sent
        to the engine; None: not to be counted.
        """
        before = self._leaving
        since_last_s = before.since_last_at(now)
        kept = exp(-since_last_s / _MEMORY_S)
        self._leaving = _Leaving(before.first_outputs * kept + 1, before.queue_s * kept + since_last_s, 0.0, now)
        self._queued -= 1
        if cached_tokens is not None:
            cached = self._cached
            kept = exp((cached.at - now) / _MEMORY_S)
            self._cached = _Cached(
                cached.cached_tokens * kept + cached_tokens, cached.prompt_tokens * kept + prompt_tokens, now
            )
        if in_engine_s is not None:
            self._note_in_engine(now, in_engine_s)

    def dropped(self, now: float, attempts: int = 1, in_engine_s: float | None = None) -> None:
        """Attempts ended without an output. For `in_engine_s` see `first_output`."""
        before = self._leaving
        self._leaving = _Leaving(before.first_outputs, before.queue_s, before.since_last_at(now), now)
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
        leaving = self._leaving
        seconds = leaving.queue_s + (leaving.since_last_at(self._clock()) if self._queued else leaving.since_last_s)
        return leaving.first_outputs / seconds if leaving.first_outputs and seconds else None

    @property
    def hit_ratio(self) -> float | None:
        """Share of prompt tokens that engines had cached, 0 to 1; None before the first report."""
        cached = self._cached
        return cached.cached_tokens / cached.prompt_tokens if cached.prompt_tokens else None

    @property
    def first_output_s(self) -> float:
        """Seconds within which almost all requests get their first output, once an engine has got them; 0: not known.

        The mean and four mean deviations, as TCP bounds a round-trip time (Jacobson, Congestion Avoidance and Control,
        SIGCOMM 1988).
        """
        known = self._in_engine
        return (known.seconds + _DEVIATIONS * known.deviations) / known.requests if known.requests else 0.0

    def _note_in_engine(self, now: float, in_engine_s: float) -> None:
        before = self._in_engine
        kept = exp((before.at - now) / _IN_ENGINE_MEMORY_S)
        requests, seconds = before.requests * kept + 1, before.seconds * kept + in_engine_s
        deviations = before.deviations * kept + abs(in_engine_s - seconds / requests)
        self._in_engine = _InEngine(requests, seconds, deviations, now)
