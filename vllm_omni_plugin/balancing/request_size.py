"""How many tokens a request has and will have, as far as anybody can know."""

from vllm_omni_plugin.balancing.base import Task

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


def _magnitude(max_tokens: int | None) -> int:
    return 0 if max_tokens is None else max_tokens.bit_length()
