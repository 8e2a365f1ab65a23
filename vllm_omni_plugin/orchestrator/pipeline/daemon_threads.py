"""A few threads for functions of users, which may never return."""

from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread


class DaemonThreads:
    """Runs calls in order. Unlike those of a `ThreadPoolExecutor`, its threads do not keep the process from ending.

    Args:
        count: calls that run at once, at most.
        name: the threads' names begin with it.
    """

    def __init__(self, count: int, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._count = count
        self._started = 0
        self._closed = False

    def submit(self, call: Callable[[], object]) -> None:
        """Run a call, which must not raise. Nothing happens once this is closed."""
        if self._closed:
            return
        self._calls.put(call)
        if self._started < self._count:
            Thread(target=self._run, name=f"{self._name}_{self._started}", daemon=True).start()
            self._started += 1

    def close(self) -> None:
        """Drop what waits; what runs ends by itself, and then its thread. Idempotent."""
        self._closed = True
        with suppress(Empty):
            while True:
                self._calls.get_nowait()
        for _ in range(self._started):
            self._calls.put(None)

    def _run(self) -> None:
        while True:
            call = self._calls.get()
            if call is None:
                return
            call()
            # What it holds is not to live until the next one comes.
            del call
