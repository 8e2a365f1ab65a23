"""Processes that start together and end together. Importing this module does not import vLLM."""

import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any

from vllm_omni_plugin.errors import ReplicaError

_START_TIMEOUT_S = 90.0
"""Longer than the longest pause before a replica is restarted, since the pauses of the ranks of a group may differ."""
RANKS_EXIT_TIMEOUT_S = 10.0
"""For a process that was killed."""


class GroupIncarnation:
    """The processes of one start of a group: when one exits, all others are killed. Thread-safe.

    The ranks may also leave, all together. Further processes are helpers.
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
        """Add the process of a rank or, with `on_exit`, a helper, which is killed when the last rank exits.

        `on_exit` is called when the helper exits, on a thread of its own. If the incarnation has ended, the process is
        killed and ReplicaError raised.
        """
        with self._changed:
            (self._ranks if on_exit is None else self._helpers).append(process)
            self._running.add(process)
            ended = self._ended
        threading.Thread(target=self._watch, args=(process, on_exit), name="omni-rank-watch", daemon=True).start()
        if ended:
            process.kill()
        self.raise_if_ended()

    def raise_if_ended(self) -> None:
        if self._ended:
            raise ReplicaError("another process of its group ended")

    def end(self) -> None:
        """Kill all processes; processes that are added later are killed too. Does not block; idempotent."""
        with self._changed:
            self._ended = True
            processes = [*self._ranks, *self._helpers]
            self._changed.notify_all()
        for process in processes:
            process.kill()

    def leave(self, rank: int, timeout: float | None) -> None:
        """Mark a rank as leaving, and block until all ranks are leaving, so that all can shut down.

        Returns sooner if the incarnation ends, and after `timeout` seconds (None: no limit).
        """
        with self._changed:
            self._leaving.add(rank)
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._ended or self._all_leave, timeout)

    def close(self, rank: BaseProcess) -> None:
        """Wait for a rank that exits. If it is the last one, kill the helpers and block until they have exited."""
        with self._changed:
            self._changed.wait_for(lambda: rank not in self._running, RANKS_EXIT_TIMEOUT_S)
            last = self._running.isdisjoint(self._ranks)
        if last:
            self.end()
            self.join()

    def join(self) -> None:
        with self._changed:
            if not self._changed.wait_for(lambda: not self._running, RANKS_EXIT_TIMEOUT_S):
                raise ReplicaError("a process of its group was killed and does not exit")

    @property
    def _all_leave(self) -> bool:
        return len(self._leaving) == self._size

    def _watch(self, process: BaseProcess, on_exit: Callable[[], None] | None) -> None:
        """When one process of the group has ended, end all others, unless all of them leave."""
        # No `process.join()`: it would reap the process, and vLLM may be about to send a signal to its id.
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
    """A barrier for the threads that start the ranks of one group. Thread-safe."""

    def __init__(self, ranks: int, new_incarnation: Callable[[], Any], timeout_s: float = _START_TIMEOUT_S) -> None:
        self._ranks = ranks
        self._new_incarnation = new_incarnation
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._waiting: set[int] = set()
        self._incarnation: Any = None
        self._starts = 0

    def wait(self, rank: int, cancelled: threading.Event) -> Any:
        """End the previous incarnation, block until all ranks wait here, and return their new incarnation.

        Raises ReplicaError after `cancel`, if other ranks are late, or if the previous incarnation does not end.
        """
        self.end_previous()
        with self._changed:
            before = self._starts
            self._waiting.add(rank)
            if len(self._waiting) == self._ranks:
                self._incarnation = self._new_incarnation()
                self._waiting.clear()
                self._starts += 1
                self._changed.notify_all()
            self._changed.wait_for(lambda: self._starts != before or cancelled.is_set(), self._timeout_s)
            if self._starts != before:
                return self._incarnation
            missing = sorted(set(range(self._ranks)) - self._waiting)
            self._waiting.discard(rank)
        if cancelled.is_set():
            raise ReplicaError("its start was cancelled")
        raise ReplicaError(f"the other ranks of its group do not start: {', '.join(map(str, missing))}")

    def end_previous(self) -> None:
        """Kill what is left of the incarnation, and block until it has ended; ReplicaError if it does not."""
        if self._incarnation is not None:
            self._incarnation.end()
            self._incarnation.join()

    def cancel(self, cancelled: threading.Event) -> None:
        with self._changed:
            cancelled.set()
            self._changed.notify_all()
