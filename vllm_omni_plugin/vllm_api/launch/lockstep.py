"""Processes that live and die as one, and how those who start them meet. Importing this imports nothing of vLLM."""

import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from vllm_omni_plugin.errors import ReplicaError

_PATIENCE_S = 90.0
"""Longer than the longest pause before a replica is started again, since the ranks of a group need not pause alike."""
_DEATH_TAKES_AT_MOST_S = 10.0


class Generation:
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

        It is killed at once if the generation has ended. `on_exit` is called when it exits, in a thread of its own.

        Raises:
            ReplicaError: the generation has ended.
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
        """Raises ReplicaError if the generation has ended."""
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

        Returns sooner if the generation ends, and after `timeout` seconds in any case; None: no limit.
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
        """Block until every process has exited; for a generation that has ended.

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


class Meeting:
    """Where those who start the ranks of one group wait for each other. Thread-safe.

    Args:
        patience: seconds that a rank waits for the others.
    """

    def __init__(self, ranks: int, new_generation: Callable[[], Any], patience: float = _PATIENCE_S) -> None:
        self._ranks = ranks
        self._new_generation = new_generation
        self._patience = patience
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._generation: Any = None
        self._meetings = 0

    def attend(self, rank: int, given_up: threading.Event) -> Any:
        """Block until all ranks are here, and return the generation that they begin. The one before is ended first.

        Args:
            rank: who waits; once at a time.
            given_up: set by `give_up`.

        Raises:
            ReplicaError: it was given up, the others did not come in time, or the last generation does not end.
        """
        previous = self._generation
        if previous is not None:
            previous.end()
            previous.join()
        with self._changed:
            before = self._meetings
            self._waiting.add(rank)
            if len(self._waiting) == self._ranks:
                self._begin()
            self._changed.wait_for(lambda: self._meetings != before or given_up.is_set(), self._patience)
            if self._meetings == before:
                missing = sorted(set(range(self._ranks)) - self._waiting)
                self._waiting.discard(rank)
                raise ReplicaError(_why_alone(missing, given_up.is_set()))
            return self._generation

    def give_up(self, given_up: threading.Event) -> None:
        """Set the event, and let whoever waits with it go."""
        with self._changed:
            given_up.set()
            self._changed.notify_all()

    def _begin(self) -> None:
        self._generation = self._new_generation()
        self._waiting.clear()
        self._meetings += 1
        self._changed.notify_all()


def _why_alone(missing: list[int], given_up: bool) -> str:
    if given_up:
        return "its start was given up"
    return f"the other ranks of its group do not start: {', '.join(map(str, missing))}"
