"""How long an engine has shown no sign that it computes requests."""

from dataclasses import dataclass

_LONG_GAPS = 4.0
"""Limit of a silence, as a multiple of the longest gap between two signs so far: steps differ."""


@dataclass(slots=True, eq=False)
class Progress:
    """The signs of one replica that its engine computes, since it began to serve. Each output is one.

    An answer to a probe is none: an engine whose scheduler stands still answers between its empty steps. `since`:
    monotonic seconds of the last sign, or of a later time before which silence has another cause. `longest_gap`:
    seconds between two signs while something was to be answered. `highest_kv_usage`: share of KV memory, since the last
    output.
    """

    since: float = 0.0
    longest_gap: float = 0.0
    highest_kv_usage: float = 0.0

    def limit(self, timeout: float) -> float:
        """Seconds of silence that count as a stall; `timeout` is the least."""
        return max(timeout, _LONG_GAPS * self.longest_gap)

    def report(self, now: float, kv_usage: float) -> None:
        """The engine reported its KV memory in use. It grows while a long prompt is computed in parts: a sign."""
        if kv_usage > self.highest_kv_usage:
            self.highest_kv_usage, self.since = kv_usage, now
