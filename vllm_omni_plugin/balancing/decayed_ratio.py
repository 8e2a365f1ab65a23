"""What was observed against what was estimated, the older the less."""

from dataclasses import dataclass


@dataclass(slots=True)
class DecayedRatio:
    """Sums of observed and estimated seconds, halved every so often. "Now" may be on any scale that does not go back.

    The ratio of the sums and not the mean of ratios: a short request's ratio says little and would count as much.
    """

    observed: float = 0.0
    estimated: float = 0.0
    as_of: float = 0.0

    def add(self, observed: float, estimated: float, now: float, half_life: float) -> None:
        """One more observation, after letting the older ones decay to `now`."""
        weight = 0.5 ** ((now - self.as_of) / half_life)
        self.observed = self.observed * weight + observed
        self.estimated = self.estimated * weight + estimated
        self.as_of = now

    def value(self, now: float, half_life: float, prior: float, prior_weight: float) -> float:
        """The ratio at `now`, drawn towards `prior` as if `prior_weight` estimated seconds had had that ratio."""
        weight: float = 0.5 ** ((now - self.as_of) / half_life)
        return (self.observed * weight + prior * prior_weight) / (self.estimated * weight + prior_weight)
