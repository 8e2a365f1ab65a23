"""How many nodes there should be, from how long a request that comes now would wait for an engine."""

from dataclasses import dataclass
from math import ceil

WINDOW_S = 300.0
"""How long requests must not have waited before a node goes: the window of Kubernetes' autoscaler."""
_CALM = 0.5
"""Share of the target below which a wait counts as none, so that a wait near the target changes nothing."""


@dataclass(frozen=True)
class Load:
    """What a head says of the stage that the nodes serve.

    Attributes:
        serving: replicas that take requests.
        expected_wait: seconds until an engine would begin a request that came now.
    """

    serving: int
    expected_wait: float


class Scaler:
    """Decides on the number of nodes. More are wanted at once, fewer one at a time after a calm window.

    The formula for more is that of Kubernetes' HorizontalPodAutoscaler, ceil(serving * metric / target) with what
    serves already. Queues grow while models load: until all that were asked for serve, it is used once in a window.
    https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/#algorithm-details

    Args:
        minimum: nodes that there are at least, and at first; 1 or more.
        maximum: nodes that there are at most.
        target_wait: the wait above which there are too few, in seconds; above 0.
    """

    def __init__(self, minimum: int, maximum: int, target_wait: float) -> None:
        self._minimum = minimum
        self._maximum = maximum
        self._target = target_wait
        self._wanted = minimum
        self._raised_at = float("-inf")
        self._calm_since: float | None = None

    def wanted(self, now: float, load: Load | None) -> int:
        """How many nodes there should be now.

        Args:
            now: time in seconds.
            load: what a head says; None where it says nothing, which changes nothing and is not calm.
        """
        if load is None or load.expected_wait > self._target * _CALM:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = now
        if load is not None and load.expected_wait > self._target:
            # Replicas of the head itself, or of a node with several, must not count as so many nodes.
            serving = max(1, min(load.serving, self._wanted))
            needed = ceil(min(self._maximum, serving * load.expected_wait / self._target))
            if needed > self._wanted and (load.serving >= self._wanted or now - self._raised_at >= WINDOW_S):
                self._wanted, self._raised_at = needed, now
        elif self._calm_since is not None and now - self._calm_since >= WINDOW_S and self._wanted > self._minimum:
            self._wanted -= 1
            self._calm_since = now
        return self._wanted
