"""Whether what was measured again and again grows over time: a slope, its confidence, and what follows from the two."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

CONFIDENCE = 0.95
WARM_UP = 0.2
"""Share of the samples, the first ones, that count for nothing: caches and allocators fill."""
ENOUGH = 5
"""Samples that are enough for a trend."""


@dataclass(frozen=True)
class Trend:
    """The straight line through samples over time, by Theil and Sen, which outliers hardly move.

    The bounds are Sen's, from Kendall's statistic (P. K. Sen, Estimates of the Regression Coefficient Based on
    Kendall's Tau, 1968). They take samples for independent of each other.

    Attributes:
        samples: how many count.
        first: median of the first third of them.
        last: median of the last third.
        slope: per hour.
        low: what the slope is above with a probability of 97.5%.
        high: what it is below with the same.
    """

    samples: int
    first: float
    last: float
    slope: float
    low: float
    high: float

    def verdict(self, allowed: float) -> str:
        """What the trend says.

        Args:
            allowed: slope per hour that counts as none.

        Returns:
            "flat": it is below `allowed`; "grows": it may be above, and is above 0; "unclear": it may be above, and may
            be none, so the run was too short to tell.
        """
        if self.high <= allowed:
            return "flat"
        return "grows" if self.low > 0 else "unclear"


def trend(hours: Sequence[float], values: Sequence[float]) -> Trend:
    """The trend of samples in the order of time, without those of the warm-up.

    Args:
        hours: when each was taken; no two at the same time.
        values: what was measured.

    Raises:
        ValueError: there are too few.
    """
    if len(hours) < ENOUGH:
        raise ValueError(f"{len(hours)} samples are too few for a trend: at least {ENOUGH}")
    warm_up = int(WARM_UP * len(hours))
    x, y = np.array(hours[warm_up:], float), np.array(values[warm_up:], float)
    sooner, later = np.triu_indices(len(x), 1)
    slopes = np.sort((y[later] - y[sooner]) / (x[later] - x[sooner]))
    low, high = _bounds(len(x), len(slopes))
    third = max(1, len(y) // 3)
    return Trend(
        len(x),
        float(np.median(y[:third])),
        float(np.median(y[-third:])),
        float(np.median(slopes)),
        float(slopes[low]),
        float(slopes[high]),
    )


def _bounds(samples: int, slopes: int) -> tuple[int, int]:
    """Indices of the two sorted slopes between which the true one lies; the outermost where there are too few."""
    deviation = np.sqrt(samples * (samples - 1) * (2 * samples + 5) / 18)
    spread = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * deviation
    low, high = math.floor((slopes - spread) / 2) - 1, math.ceil((slopes + spread) / 2)
    return max(low, 0), min(high, slopes - 1)
