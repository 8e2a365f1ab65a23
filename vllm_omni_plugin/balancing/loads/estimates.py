"""What a request will take, estimated from itself and from those that have ended."""

from dataclasses import dataclass

from vllm_omni_plugin.balancing.interface import Task

_UNKNOWN_PROMPT = 512
"""Tokens of a prompt whose length nobody told."""

_FIRST_GUESS = 256.0
"""Tokens of an answer before any was seen; counts as one that was."""

_WINDOW = 100
"""Answers after which the mean becomes an exponentially decayed one, so that it follows a changing workload."""


def prompt_tokens(task: Task) -> int:
    """Tokens of a request's prompt; 512 if the task has none."""
    prompt = task.get("prompt")
    return _UNKNOWN_PROMPT if prompt is None else len(prompt.token_ids)


class OutputLengths:
    """Mean length of the answers seen, apart for each order of magnitude (to base 2) of what a request allowed.

    Who asks for 16 tokens gets other answers than who allows 4,000, and one mean of both would suit neither. Memory is
    bounded: there are as many means as bits in a limit.
    """

    def __init__(self) -> None:
        self._means: dict[int, tuple[float, int]] = {}

    def expected(self, max_tokens: int | None) -> float:
        """Tokens that an answer will probably have, if it may have `max_tokens` (None: no limit)."""
        mean, _ = self._means.get(_magnitude(max_tokens), (_FIRST_GUESS, 1))
        return mean if max_tokens is None else min(mean, max_tokens)

    def saw(self, max_tokens: int | None, tokens: int) -> None:
        """An answer that might have had `max_tokens` had `tokens`."""
        magnitude = _magnitude(max_tokens)
        mean, count = self._means.get(magnitude, (_FIRST_GUESS, 1))
        count = min(count + 1, _WINDOW)
        self._means[magnitude] = mean + (tokens - mean) / count, count


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


def _magnitude(max_tokens: int | None) -> int:
    return 0 if max_tokens is None else max_tokens.bit_length()
