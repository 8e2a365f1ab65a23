"""A server with several API server processes on one socket, and connections to a certain one of them."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import psutil

from .server import START_S, Server, until
from .suspended import standing_still

_LOGGED = re.compile(r"\(ApiServer_(\d+) pid=(\d+)\)")
_SERVES = re.compile(r"Replica ([\d.]+(?: of this node)?) \(process (\d+)\) serves")
_NAMED = re.compile(r"Replica (\d+ of this node) is replica ([\d.]+) of the fleet")
_MAX_CONNECTIONS = 32
"""A new connection goes to the process with the fewest, and a tie to whichever wakes first."""


class UnreachedError(AssertionError):
    """No connection was to the process that was meant."""


class ApiServers(Server):
    """A `vllm serve` that supervises API servers. Its `http()` reaches any of them.

    Args:
        scratch: where its processes put temporary files; the others are those of `Server`.
    """

    def __init__(self, model: Path, log: Path, *args: str, scratch: str, **environment: str) -> None:
        self.scratch = scratch
        super().__init__(model, log, *args, TMPDIR=scratch, **environment)

    @cached_property
    def local_key(self) -> str:
        command = [str(Path(sys.executable).with_name("vllm-omni-plugin")), "admin-key", "--url", self.url]
        environment = {**os.environ, "TMPDIR": self.scratch}
        return subprocess.check_output(command, env=environment, text=True).strip()

    @property
    def pids(self) -> dict[int, int]:
        """Process id of each API server that was started last, by number."""
        return {int(number): int(pid) for number, pid in _LOGGED.findall(self.log.read_text())}

    @contextmanager
    def engines_standing_still(self) -> Iterator[None]:
        """No engine computes anything in the block, so that what is in flight stays there."""
        with standing_still(engine.pid for engine in self.engines):
            yield

    @property
    def engines(self) -> list[psutil.Process]:
        log = self.log.read_text()
        names = dict(_NAMED.findall(log))
        pids = {names.get(name, name): pid for name, pid in _SERVES.findall(log)}
        return [psutil.Process(int(pid)) for pid in pids.values()]

    @contextmanager
    def connected(self, number: int, timeout: float = 120.0) -> Iterator[httpx.Client]:
        """An operator's client with one connection, which is to this API server."""
        pid = self.pids[number]
        with ExitStack() as connections:
            for _ in range(_MAX_CONNECTIONS):
                client = connections.enter_context(self.operator(timeout))
                # Those that are not wanted stay open, so that the next one goes to another process.
                if self._end_of(client, pid):
                    yield client
                    return
            raise UnreachedError(f"{_MAX_CONNECTIONS} connections, and none is to API server {number} ({pid})")

    def wait_for_restart(self, number: int, before: int) -> None:
        """Return once the successor of a process serves."""
        until(lambda: self.pids[number] != before, f"API server {number} is restarted", START_S)

        def serves() -> bool:
            # It takes no connections until it has found the fleet.
            with suppress(UnreachedError), self.connected(number) as client:
                return client.get("/health").status_code == httpx.codes.OK
            return False

        until(serves, f"API server {number} serves again", START_S)

    def _end_of(self, client: httpx.Client, pid: int) -> bool:
        response = client.get("/version")
        port: int = response.extensions["network_stream"].get_extra_info("client_addr")[1]
        connections: list[Any] = psutil.Process(pid).net_connections("tcp")
        return any(connection.raddr and connection.raddr.port == port for connection in connections)
