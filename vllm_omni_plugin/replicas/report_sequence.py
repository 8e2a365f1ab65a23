"""The order of an engine's cache reports: what is applied at once, what waits, what is asked for, what is lost."""

from typing import NamedTuple

MAX_WAITING = 10_000
"""Batches kept while those before them are asked for: as many as vLLM's publisher remembers by default."""


class Step(NamedTuple):
    """What to do now.

    Attributes:
        lost: batches before those of this step will never come.
        batches: to be applied, in order.
        ask: ask the publisher for its batches from `ReportSequence.expected` on.
    """

    lost: bool = False
    batches: tuple[bytes, ...] = ()
    ask: bool = False


class ReportSequence:
    """Follows the numbers that vLLM's publisher gives to batches, from 0 when an engine starts.

    A publisher drops what a subscriber does not take in time, or sent before it subscribed, and remembers its last
    batches for who asks. A replay holds all batches published until it is made.

    Args:
        can_ask: whether the publisher can be asked.

    Attributes:
        expected: number of the batch that comes next.
        asked: whether an answer is outstanding.
    """

    def __init__(self, can_ask: bool) -> None:
        self.expected = 0
        self.asked = False
        self._can_ask = can_ask
        self._waiting: list[tuple[int, bytes]] = []

    def published(self, number: int, payload: bytes) -> Step:
        """A batch came by itself."""
        if number == self.expected:
            self.expected += 1
            return Step(batches=(payload,))
        if number < self.expected:
            return Step()
        if not self._can_ask:
            self.expected = number + 1
            return Step(lost=True, batches=(payload,))
        if len(self._waiting) < MAX_WAITING:
            self._waiting.append((number, payload))
        return Step() if self.asked else self.ask()

    def ask(self) -> Step:
        """Ask for what may have been missed."""
        self.asked = True
        return Step(ask=True)

    def replayed(self, number: int, payload: bytes) -> Step:
        """A batch came because we asked. Those before it are forgotten by the publisher if we do not have them."""
        if number < self.expected:
            return Step()
        lost = number > self.expected
        self.expected = number + 1
        return Step(lost=lost, batches=(payload,))

    def replay_ended(self) -> Step:
        """All of the answer has come, or none will: what is still missing is lost."""
        self.asked = False
        waiting, self._waiting = self._waiting, []
        lost = False
        batches: list[bytes] = []
        for number, payload in waiting:
            if number < self.expected:
                continue
            if number > self.expected:
                lost = True
                batches.clear()
            batches.append(payload)
            self.expected = number + 1
        return Step(lost=lost, batches=tuple(batches))
