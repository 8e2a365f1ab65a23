"""Engines that a test lets run and stand still as it likes."""

import os
from contextlib import suppress

import psutil

from .server import Server, until

_MOMENT_CPU_S = 0.02
"""Enough for a few tokens, and far from enough for a long answer."""


class Engine:
    """The processes of one engine, which can be made to stand still.

    They are kept to one core: engines spin while they wait, and on a small machine the server and its clients may else
    not get a core before all tokens are made.
    """

    def __init__(self, pid: int) -> None:
        self.core = psutil.Process(pid)
        self.workers: list[psutil.Process] = self.core.children(recursive=True)
        for process in (self.core, *self.workers):
            process.cpu_affinity([max(os.sched_getaffinity(0))])

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


def engines_of(server: Server) -> dict[str, Engine]:
    """The engines that a server's replicas run now, by replica."""
    return {str(replica): Engine(pid) for replica, pid in server.engine_pids().items()}
