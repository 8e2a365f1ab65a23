"""What the orchestrator counts, in plain numbers that any thread may read."""

from bisect import bisect_left

QUEUE_TIME_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 60.0)


class Histogram:
    """Counts of observations per bucket, written by one thread. A reader may be one observation behind, never wrong."""

    def __init__(self, upper_bounds: tuple[float, ...]) -> None:
        self.upper_bounds = upper_bounds
        self.counts = [0] * (len(upper_bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.upper_bounds, value)] += 1
        self.sum += value


class OrchestratorMetrics:
    """Counters of one orchestrator since its start.

    Attributes:
        queue_time: seconds between the hand-over of a request and its dispatch.
        moves: requests sent again to another replica, because theirs was lost.
        lost: requests that ended with an error because their replica was lost.
        refused: requests refused because no replica could serve, after they had been accepted.
        turned_away: requests refused for the same reason before that; written by AsyncLLM's thread, all else by ours.
    """

    def __init__(self) -> None:
        self.queue_time = Histogram(QUEUE_TIME_BUCKETS_S)
        self.moves = 0
        self.lost = 0
        self.refused = 0
        self.turned_away = 0
