"""Processes that live and die as one, and how those who start them meet. Importing this imports nothing of vLLM."""

import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from vllm_omni_plugin.errors import ReplicaError

_START_TIMEOUT_S = 90.0
"""Longer than the longest pause before a replica is started again, since the ranks of a group need not pause alike."""
_DEATH_TAKES_AT_MOST_S = 10.0


class GroupIncarnation:
    """The processes of one life of a group: when one ends, all are killed. Thread-safe.

    Args:
        ranks: how many of them are ranks, which may also leave in order, together. The others help them.
    """

    def __init__(self, ranks: int) -> None:
        self._size = ranks
        self._changed = threading.Condition()
        self._ranks: list[BaseProcess] = []
        self._helpers: list[BaseProcess] = []
        self._running: set[BaseProcess] = set()
        self._leaving: set[int] = set()
        self._ended = False

    def add(self, process: BaseProcess, on_exit: Callable[[], None] | None = None) -> None:
        """Take in the process of a rank, or with `on_exit` a helper, which ends with the last rank.

        It is killed at once if the incarnation has ended. `on_exit` is called when it exits, in a thread of its own.

        Raises:
            ReplicaError: the incarnation has ended.
        """
        with self._changed:
            (self._ranks if on_exit is None else self._helpers).append(process)
            self._running.add(process)
            ended = self._ended
        threading.Thread(target=self._watch, args=(process, on_exit), name="omni-rank-watch", daemon=True).start()
        if ended:
            process.kill()
        self.require()

    def require(self) -> None:
        """Raises ReplicaError if the incarnation has ended."""
        if self._ended:
            raise ReplicaError("another process of its group ended")

    def end(self) -> None:
        """Kill all processes, also those yet to be added. Does not block; idempotent."""
        with self._changed:
            self._ended = True
            processes = [*self._ranks, *self._helpers]
            self._changed.notify_all()
        for process in processes:
            process.kill()

    def leave(self, rank: int, timeout: float | None) -> None:
        """Say that a rank is not needed any more, and block until none is, so that all can be ended in order.

        Returns sooner if the incarnation ends, and after `timeout` seconds in any case; None: no limit.
        """
        with self._changed:
            self._leaving.add(rank)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or self._all_leave, timeout)

    def close(self, rank: BaseProcess) -> None:
        """Forget a rank that has exited; the last one takes the helpers with it. Blocks until they have ended."""
        with self._changed:
            self._changed.wait_for(lambda: rank not in self._running, _DEATH_TAKES_AT_MOST_S)
            last = self._running.isdisjoint(self._ranks)
        if last:
            self.end()
            self.join()

    def join(self) -> None:
        """Block until every process has exited; for an incarnation that has ended.

        Raises:
            ReplicaError: one does not exit although it was killed.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._running, _DEATH_TAKES_AT_MOST_S):
                raise ReplicaError("a process of its group cannot be ended")

    @property
    def _all_leave(self) -> bool:
        return len(self._leaving) == self._size

    def _watch(self, process: BaseProcess, on_exit: Callable[[], None] | None) -> None:
        # Not by joining it: that would reap it, and with it goes the number by which vLLM may be about to kill it.
        wait([process.sentinel])
        if on_exit is not None:
            on_exit()
        with self._changed:
            self._running.discard(process)
            last = self._running.isdisjoint(self._ranks)
            self._changed.notify_all()
        if last or not self._all_leave:
            self.end()


class StartBarrier:
    """Where those who start the ranks of one group wait for each other. Thread-safe.

    Args:
        timeout_s: seconds that a rank waits for the others.
    """

    def __init__(self, ranks: int, new_incarnation: Callable[[], Any], timeout_s: float = _START_TIMEOUT_S) -> None:
        self._ranks = ranks
        self._new_incarnation = new_incarnation
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._incarnation: Any = None
        self._starts = 0

    def wait(self, rank: int, cancelled: threading.Event) -> Any:
        """Block until all ranks are here, and return the incarnation that they begin. The one before is ended first.

        Args:
            rank: who waits; once at a time.
            cancelled: set by `cancel`.

        Raises:
            ReplicaError: it was given up, the others did not come in time, or the last incarnation does not end.
        """
        previous = self._incarnation
        if previous is not None:
            previous.end()
            previous.join()
        with self._changed:
            before = self._starts
            self._waiting.add(rank)
            if len(self._waiting) == self._ranks:
                self._begin()
            self._changed.wait_for(lambda: self._starts != before or cancelled.is_set(), self._timeout_s)
            if self._starts == before:
                missing = sorted(set(range(self._ranks)) - self._waiting)
                self._waiting.discard(rank)
                raise ReplicaError(_why_alone(missing, cancelled.is_set()))
            return self._incarnation

    def cancel(self, cancelled: threading.Event) -> None:
        """Set the event, and let whoever waits with it go."""
        with self._changed:
            cancelled.set()
            self._changed.notify_all()

    def _begin(self) -> None:
        self._incarnation = self._new_incarnation()
        self._waiting.clear()
        self._starts += 1
        self._changed.notify_all()


def _why_alone(missing: list[int], cancelled: bool) -> str:
    if cancelled:
        return "its start was cancelled"
    return f"the other ranks of its group do not start: {', '.join(map(str, missing))}"
