"""How evenly a fleet is loaded during some time, by what its head says of its replicas now and then."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any


class Evenness:
    """Looks at the list of `/omni/replicas`, one after the other."""

    def __init__(self) -> None:
        self._variations: list[float] = []
        self._first: dict[str, int] | None = None
        self._last: dict[str, int] = {}

    def note(self, replicas: Sequence[Mapping[str, Any]]) -> None:
        """The head lists its replicas."""
        serving = [each for each in replicas if each["status"] == "up"]
        loads = [each["in_flight"] for each in serving]
        if sum(loads) >= len(loads) > 1:
            # With fewer requests than replicas no spread is even.
            self._variations.append(_variation(loads))
        dispatched = {each["id"]: each["dispatched"] for each in serving}
        if self._first is None:
            self._first = dispatched
        # A number may be another replica's later, which has been sent less.
        kept = {id_ for id_, count in self._first.items() if dispatched.get(id_, -1) >= self._last.get(id_, count)}
        self._first = {id_: count for id_, count in self._first.items() if id_ in kept}
        self._last = dispatched

    @property
    def in_flight(self) -> float:
        """Coefficient of variation of requests in flight over the replicas that served, mean of all looks at which
        there was one for each; 0 without any."""
        return statistics.mean(self._variations or [0.0])

    @property
    def dispatched(self) -> float:
        """Coefficient of variation of requests sent to the replicas that served all the time; 0 without any."""
        first = self._first or {}
        return _variation([self._last[id_] - count for id_, count in first.items()])


def _variation(counts: Iterable[float]) -> float:
    counts = list(counts)
    mean = statistics.mean(counts or [0.0])
    return statistics.pstdev(counts) / mean if mean else 0.0
