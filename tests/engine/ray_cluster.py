"""A Ray cluster of several machines on this one, without Ray being imported."""

import sys
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import psutil

from tests.fakes.free_ports import free_port

from .server import ServeProcess, until

HAS_RAY = find_spec("ray") is not None
# Where one environment lies over another, the command `ray` is the other one's.
_RAY = (sys.executable, "-m", "ray.scripts.scripts")
# Ray takes 127.0.0.1 for the address of the network; with one address each, machines do not take each other's ports.
_FIRST_ADDRESS = 2
_COMMON = (
    *("--num-gpus", "0", "--object-store-memory", "100000000"),
    *("--min-worker-port", "0", "--max-worker-port", "0"),
    *("--disable-usage-stats", "--block"),
)
_QUIET = {"RAY_memory_monitor_refresh_ms": "0", "RAY_USAGE_STATS_ENABLED": "0"}
# Else a token that Ray has left in this user's home is asked for by the first machine, and not sent by the others.
NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}
_START_S = 60.0


class RayMachine(ServeProcess):
    """One `ray start` with everything below it."""

    def runs(self) -> bool:
        text = self.log.read_text()
        assert self.process.poll() is None, text[-4000:]
        return "will now block" in text

    def nodes(self) -> list[psutil.Process]:
        found = []
        for process in self._below():
            with suppress(psutil.NoSuchProcess):
                if "--headless" in process.cmdline():
                    found.append(process)
        return found

    def lose(self) -> list[psutil.Process]:
        """Kill all of it at once, as when a machine loses power; returns what was killed."""
        below = self._below()
        # Stopped first, so that none sees another's end.
        for process in below:
            process.suspend()
        for process in below:
            process.kill()
        self.kill()
        return below

    def _below(self) -> list[psutil.Process]:
        return [] if self.process.poll() is not None else psutil.Process(self.process.pid).children(recursive=True)


class RayCluster:
    """A machine that has no CPUs for nodes, and others that have one each. A context manager; leaving it ends all.

    Args:
        folder: for logs and Ray's own files; short, because of paths of sockets.
        machines: those with a CPU.
    """

    def __init__(self, folder: Path, machines: int) -> None:
        self._folder = folder
        port = str(free_port())
        self.address = f"127.0.0.{_FIRST_ADDRESS}:{port}"
        ports = ("--port", port, "--ray-client-server-port", str(free_port()))
        self._all: list[RayMachine] = []
        try:
            self._start("--head", "--num-cpus", "0", *ports, "--include-dashboard", "false", "--temp-dir", str(folder))
            self.machines = [self._start("--num-cpus", "1", "--address", self.address) for _ in range(machines)]
        except BaseException:
            self.stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End everything; without notice, for which Ray takes half a minute."""
        for machine in self._all:
            if machine.process.poll() is None:
                machine.lose()

    def _start(self, *arguments: str) -> RayMachine:
        number = len(self._all)
        log = self._folder / f"{number}.log"
        here = ("--node-ip-address", f"127.0.0.{_FIRST_ADDRESS + number}")
        ports = ("--dashboard-agent-listen-port", str(free_port()))
        machine = RayMachine([*_RAY, "start", *arguments, *here, *ports, *_COMMON], log, **_QUIET, **NO_TOKEN)
        self._all.append(machine)
        until(machine.runs, f"Ray starts; log: {log}", _START_S)
        return machine
