"""Whether an engine's own loop still answers, of which the existence of its process says nothing."""

import asyncio
from collections.abc import Callable
from typing import Protocol

_LONG_STEPS = 4.0
"""How many times the longest answer seen an engine may take: it answers between steps only, and steps differ."""
_FADE = 0.99
"""What is left of the longest answer with each later one, or one compilation would hide every hang from then on."""
_LONG_CALL_S = 300.0
"""What an engine may take for a long call that it was sent before, in which it answers nothing."""


class Probed(Protocol):
    """An engine's client; `StageClient` in service.

    Attributes:
        is_busy: whether the engine has a call to carry out that may take long, before it can answer a probe.
        is_read: whether what it answers is read at all.
    """

    @property
    def is_busy(self) -> bool: ...

    @property
    def is_read(self) -> bool: ...

    async def answers(self) -> None: ...


class Probe:
    """Asks the engine at intervals, once at a time, and says when it hangs and when it is back.

    Args:
        client: asks the engine; raises `ReplicaError` when it is dead.
        interval: seconds between an answer and the next question.
        timeout: seconds an answer may take, unless answers that took long were seen; see `limit`.
        on_hang: called with the reason when an answer is overdue.
        on_answer: called when an overdue answer has come after all.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        client: Probed,
        interval: float,
        timeout: float,
        on_hang: Callable[[str], None],
        on_answer: Callable[[], None],
        clock: Callable[[], float],
    ) -> None:
        self._client = client
        self._interval = interval
        self._timeout = timeout
        self._on_hang = on_hang
        self._on_answer = on_answer
        self._clock = clock
        self._longest = 0.0
        # Whether the time of the answer that is awaited says something of the engine's steps.
        self._is_fair = True

    @property
    def limit(self) -> float:
        """Seconds after which a question that is not answered means a hang.

        An answer that came later than that counts as one that took so long: what looked like a hang may have been one
        of many long steps, and then requests would move from one engine to the next and end nowhere.
        """
        return max(self._timeout, _LONG_STEPS * self._longest)

    def start(self, give_up: Callable[[str], None]) -> "asyncio.Task[None]":
        """Probe in a task, until that is cancelled or the engine is dead or fails the question; then `give_up`."""

        def ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled():
                give_up(f"its engine cannot be probed: {task.exception()}")

        task = asyncio.create_task(self.run(), name="omni-probe")
        task.add_done_callback(ended)
        return task

    async def run(self) -> None:
        """Probe until cancelled. Raises `ReplicaError` when the engine is dead."""
        while True:
            await asyncio.sleep(self._interval)
            asked_at, limit, is_busy = self._clock(), self.limit, self._client.is_busy
            patience = max(limit, _LONG_CALL_S) if is_busy else limit
            self._is_fair = not is_busy
            answer = asyncio.ensure_future(self._client.answers())
            try:
                if await self._comes(answer, patience):
                    await answer
                else:
                    self._on_hang(f"its engine has not answered for {patience:.1f} s")
                    await answer
                    self._on_answer()
            finally:
                answer.cancel()
            self._longest *= _FADE
            if self._is_fair:
                self._longest = max(self._longest, min(self._clock() - asked_at, limit))

    async def _comes(self, answer: "asyncio.Future[None]", patience: float) -> bool:
        """Whether the answer comes in time. Time in which this process could not have read it does not count."""
        while True:
            waits_from = self._clock()
            answered, _ = await asyncio.wait({answer}, timeout=patience)
            if answered:
                return True
            late_by = self._clock() - waits_from - patience
            if self._client.is_read and late_by <= self._interval:
                return False
            self._is_fair = False
