"""The times of another node's clock, told in ours."""

from typing import Any

_WINDOW_S = 60.0


class ClockOffset:
    """Estimates how far a sender's monotonic clock is behind ours, from the times at which its messages arrive.

    Each message says that the offset is at most its arrival minus its timestamp, the excess being its time on the way;
    the smallest of many is closest to the truth (as in NTP's clock filter, RFC 5905 section 10). Only the last one to
    two minutes count, since clocks drift apart.
    """

    def __init__(self) -> None:
        self._window_ends_at = 0.0
        self._smallest = self._smallest_before = float("inf")

    def observe(self, timestamp: float, now: float) -> float:
        """Seconds to add to the sender's times, given a message of `timestamp` that arrived at `now`."""
        if now >= self._window_ends_at:
            self._window_ends_at = now + _WINDOW_S
            self._smallest_before, self._smallest = self._smallest, float("inf")
        self._smallest = min(self._smallest, now - timestamp)
        return min(self._smallest, self._smallest_before)


def rebase(outputs: Any, offset: ClockOffset, now: float) -> None:
    """Tell all times of an `EngineCoreOutputs` that arrived at `now` in our clock.

    vLLM takes intervals between them, and a request that moved has times of two engines.
    """
    seconds = offset.observe(outputs.timestamp, now)
    outputs.timestamp += seconds
    for output in outputs.outputs:
        if output.events:
            for event in output.events:
                event.timestamp += seconds
