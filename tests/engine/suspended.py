"""Engines that a test lets run and stand still as it likes."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

import psutil

from .server import Server, until

PATIENT = ("--omni-heartbeat-timeout", "120", "--omni-stall-timeout", "120")
"""For heads whose own engines stand still in tests for as long as a slow machine needs, and are not to be left."""
_MOMENT_CPU_S = 0.02
"""Enough for a few tokens, and far from enough for a long answer."""


def keep_to_one_core(engine: psutil.Process) -> list[psutil.Process]:
    """Leave the other cores to servers and clients; returns the engine's workers.

    Engines spin while they wait, and on a small machine nobody else may get a core before all tokens are made.
    """
    workers: list[psutil.Process] = engine.children(recursive=True)
    for process in (engine, *workers):
        process.cpu_affinity([max(os.sched_getaffinity(0))])
    return workers


class Engine:
    """The processes of one engine, which can be made to stand still.

    They are kept to one core, see `keep_to_one_core`.
    """

    def __init__(self, pid: int) -> None:
        self.core = psutil.Process(pid)
        self.workers = keep_to_one_core(self.core)

    def suspend(self) -> None:
        for process in (self.core, *self.workers):
            process.suspend()

    def resume(self) -> None:
        """Let it go on; nothing happens to what was killed meanwhile."""
        for process in (self.core, *self.workers):
            with suppress(psutil.NoSuchProcess):
                process.resume()

    def run_for_a_moment(self) -> None:
        used = sum(self.core.cpu_times()[:2])
        self.resume()
        until(lambda: sum(self.core.cpu_times()[:2]) - used > _MOMENT_CPU_S, "the engine has run for a moment")
        self.suspend()


@contextmanager
def standing_still(pids: Iterable[int]) -> Iterator[None]:
    """Engines, by their process ids, compute nothing in the block. Not for long, or they are taken to hang."""
    engines = [Engine(pid) for pid in pids]
    for engine in engines:
        engine.suspend()
    try:
        yield
    finally:
        for engine in engines:
            engine.resume()


def engines_of(server: Server) -> dict[str, Engine]:
    return {str(replica): Engine(pid) for replica, pid in server.engine_pids().items()}
