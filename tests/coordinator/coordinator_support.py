"""What the coordinator's tests share."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from tests.fakes.free_ports import free_port
from vllm_omni_plugin.coordinator import ReplicaEvent, ReplicaList, ReplicaStatus, encode_event

ANY = "tcp://127.0.0.1:*"

Socket = zmq.Socket[bytes]
OpenSocket = Callable[[int], Socket]
OpenDealer = Callable[[str], Socket]


def make_event(
    name: str = "a",
    *,
    stage_id: int = 0,
    status: ReplicaStatus = ReplicaStatus.UP,
    queue_length: int = 0,
    incarnation: int = 0,
    sequence: int = 0,
) -> ReplicaEvent:
    return ReplicaEvent(
        input_addr=f"tcp://{name}:1",
        output_addr=f"tcp://{name}:2",
        stage_id=stage_id,
        event_type="update",
        status=status,
        queue_length=queue_length,
        incarnation=incarnation,
        sequence=sequence,
    )


_VALID = encode_event(make_event())
BAD_FRAMES = [
    b"",
    b"[]",
    b"\xef\xbb\xbf" + _VALID,
    _VALID[:-1],
    _VALID + b"{}",
    _VALID.replace(b"tcp://a:1", b"\xff"),
    _VALID.replace(b"tcp://a:1", b"\\ud800"),
    _VALID.replace(b'"up"', b'"sleepy"'),
    _VALID.replace(b'"queue_length":0', b'"queue_length":' + b"9" * 5000),
    b"[" * 60_000,
    b'{"x":' * 10_000,
    _VALID[:-1] + b',"deep":' + b"[" * 60_000 + b"]" * 1000,
    _VALID[:-1] + b',"padding":"' + b"x" * 65_536 + b'"}',
]
"""Frames that are no valid event of a replica."""


def free_address() -> str:
    """Return a TCP address on which nobody listens now."""
    return f"tcp://127.0.0.1:{free_port()}"


def names(replicas: ReplicaList) -> list[str]:
    """Return the names of the replicas that take work, sorted."""
    return sorted(replica.input_addr.removeprefix("tcp://").removesuffix(":1") for replica in replicas.replicas)


def eventually(condition: Callable[[], object], within: float = 20.0) -> None:
    """Return once ``condition`` holds; fail if it does not within that many seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


def read_if_there(path: Path) -> str:
    """Return the text of a file of /proc, empty if its process or thread has ended."""
    try:
        return path.read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def process_status(pid: int) -> dict[str, str]:
    """Return the fields of a process in /proc, none if there is no such process."""
    lines = read_if_there(Path(f"/proc/{pid}/status")).splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


class SharedClock:
    """Monotonic seconds, and a wall clock that shows the same."""

    def __init__(self, read: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._of_thread = threading.local()

    def __call__(self) -> float:
        self._of_thread.last = self._read()
        return self._of_thread.last

    def wall(self) -> float:
        """The same time as a wall clock that was read at the very moment at which this thread last read the other."""
        return self._of_thread.last


class ManualClock(SharedClock):
    """A clock that the test sets, also while another thread reads it."""

    def __init__(self, now: float = 1000.0) -> None:
        super().__init__(lambda: self.now)
        self.now = now
