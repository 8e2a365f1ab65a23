"""The processes of one `vllm serve`: which is what, what they use of the processor, and who answers whom."""

import http.client
from contextlib import closing, suppress
from typing import NamedTuple
from urllib.parse import urlsplit

import psutil

CpuTimes = dict[int, tuple[str, float]]
"""Kind and processor seconds of processes, by process id."""
API_SERVER = "API servers"
_KINDS = {
    "VLLM::APIServer": API_SERVER,
    "VLLM::EngineCore": "engines",
    "VLLM::DPCoordinator": "coordinator",
    "vllm_omni_plugin.coordinator": "coordinator",
}
"""By a part of their command lines."""
_MACHINE = -1
"""Stands for the process id of all processes together."""
_TRIES = 8
"""Connections that are open at once while each API server is looked for."""


class Cores(NamedTuple):
    """Of all processes of one kind.

    Attributes:
        total: cores in use.
        busiest: by the one that uses most.
        processes: how many there are.
    """

    total: float
    busiest: float
    processes: int

    def __str__(self) -> str:
        return f"{self.total:.2f}" + (f" ({self.busiest:.2f})" if self.processes > 1 else "")


class ApiServers:
    """The API servers of a running `vllm serve`.

    Args:
        pid: of the command's process.
        url: where it listens.
        count: how many there are; one is the process itself.
    """

    def __init__(self, pid: int, url: str, count: int) -> None:
        self.pid, self.url, self._count = pid, url, count

    def processes(self) -> list[psutil.Process]:
        """Those that run, in the order in which they were started."""
        root = psutil.Process(self.pid)
        if self._count == 1:
            return [root]
        children = [child for child in root.children() if self._kind(child) == API_SERVER]
        return sorted(children, key=psutil.Process.create_time)

    def cpu_times(self) -> CpuTimes:
        """Kind and processor seconds of every process of the server, of this one, and of the whole machine, by id."""
        root, load, machine = psutil.Process(self.pid), psutil.Process(), psutil.cpu_times()
        times = {
            load.pid: ("load generator", _seconds(load)),
            _MACHINE: ("whole machine", sum(machine) - machine.idle - machine.iowait),
        }
        for process in (root, *root.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                times[process.pid] = (self._kind(process), _seconds(process))
        return times

    def client_ports(self, process: psutil.Process) -> set[int]:
        """The clients' ports of the connections to one of them."""
        port = urlsplit(self.url).port
        with suppress(psutil.Error):
            connections = process.net_connections("tcp")
            return {end.raddr.port for end in connections if end.raddr and end.laddr.port == port}
        return set()

    def all_answer(self) -> bool:
        """Whether each of them has answered."""
        return len(self._answering()) == self._count

    def answered_by_new(self, known: set[int]) -> bool:
        """Whether one has answered that is not among these process ids."""
        return bool(self._answering() - known)

    def _answering(self) -> set[int]:
        """Those that answered one of a few connections; all are open at once, so that they go to different ones."""
        address = urlsplit(self.url)
        with closing(_Connections()) as connections, suppress(OSError, psutil.Error, http.client.HTTPException):
            for _ in range(_TRIES):
                connections.add(address.hostname or "", address.port or 0)
            ports = connections.ports
            return {process.pid for process in self.processes() if self.client_ports(process) & ports}
        return set()

    def _kind(self, process: psutil.Process) -> str:
        if process.pid == self.pid:
            return API_SERVER if self._count == 1 else "supervisor"
        title = " ".join(process.cmdline())
        return next((kind for part, kind in _KINDS.items() if part in title), "others")


class _Connections:
    def __init__(self) -> None:
        self._open: list[http.client.HTTPConnection] = []
        self.ports: set[int] = set()

    def add(self, host: str, port: int) -> None:
        """Open one more, and return when it has been answered."""
        connection = http.client.HTTPConnection(host, port, timeout=10)
        self._open.append(connection)
        connection.request("GET", "/health")
        connection.getresponse().read()
        self.ports.add(connection.sock.getsockname()[1])

    def close(self) -> None:
        for connection in self._open:
            connection.close()


def cores_between(before: CpuTimes, after: CpuTimes, seconds: float) -> dict[str, Cores]:
    """What each kind of process used in the time between two measurements."""
    kinds: dict[str, list[float]] = {}
    for pid in before.keys() & after.keys():
        kind, then = before[pid]
        kinds.setdefault(kind, []).append((after[pid][1] - then) / seconds)
    return {kind: Cores(sum(used), max(used), len(used)) for kind, used in kinds.items()}


def _seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
