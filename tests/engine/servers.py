"""Servers that tests share, with no more engines alive at once than the machine can feed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, Self

from .server import Server

MAX_ENGINES = 3
"""A fleet of two and a plain server beside it."""


class Running(Protocol):
    """Anything with engines that can be ended."""

    def tell_to_end(self) -> None: ...

    def stop(self) -> None: ...


class Servers:
    """Starts a server when a test first asks for it and keeps it for those that follow.

    The servers that were not asked for the longest end when a new one needs their room. A context manager; leaving it
    ends all of them.

    Args:
        logs: folder where each server writes a file of its own.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._starts = 0
        # In the order of their last use.
        self._running: dict[str, tuple[Running, int]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_all()

    def stop_all(self) -> None:
        """End all of them; who asks again gets a new one."""
        self._leave_room_for(MAX_ENGINES)

    def get(self, name: str, model: Path, *args: str, engines: int, **environment: str) -> Server:
        """The running server of this name, started with these arguments if it does not run.

        Args:
            name: tells it from others; the same name always stands for the same arguments.
        """
        server: Server = self.keep(name, lambda log: Server(model, log, *args, **environment).__enter__(), engines)
        return server

    def keep(self, name: str, start: Callable[[Path], Any], engines: int) -> Any:
        """What `start(log)` returned under this name, called if it is not running.

        Args:
            start: starts something with a method `stop`, logging to the file it is given or to others beside it.
        """
        if name in self._running:
            self._running[name] = self._running.pop(name)
        else:
            self._leave_room_for(engines)
            self._starts += 1
            self._running[name] = (start(self._logs / f"{self._starts}-{name}.log"), engines)
        return self._running[name][0]

    def end(self, name: str) -> None:
        """End the one of this name; who asks for it again gets a new one."""
        self._running.pop(name)[0].stop()

    def _leave_room_for(self, engines: int) -> None:
        leaving = []
        while self._running and sum(count for _, count in self._running.values()) + engines > MAX_ENGINES:
            leaving.append(self._running.pop(next(iter(self._running)))[0])
        for server in leaving:
            server.tell_to_end()
        for server in leaving:
            server.stop()
