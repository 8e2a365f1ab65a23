"""Local engines that are not processes: real sockets and a real sentinel, controlled by the test."""

import os
import queue
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import zmq

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.engine.engine_start import Launcher

READY = b'"ready"'
UNPROBED = (3600.0, 36000.0)
"""Heartbeat interval and timeout of engines that are never probed."""


class FakeProcess:
    """Implements `Process`. Its sentinel is a pipe that closes when it ends. `exit_note` is its exit reason."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.process: FakeProcess = self
        self.signals: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.shutdowns: list[float | None] = []
        self.killed = False
        self.exit_note = ""
        self.sentinel, self._alive_end = os.pipe()
        self._ended = threading.Event()
        self._lock = threading.Lock()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def die(self) -> None:
        with self._lock:
            if self.ended:
                return
            self._ended.set()
            self.signals.put("ended")
            os.close(self._alive_end)

    def exit_reason(self) -> str:
        return self.exit_note

    def shutdown(self, timeout: float | None = None) -> None:
        self.shutdowns.append(timeout)
        self.die()

    def kill(self) -> None:
        self.killed = True
        self.die()

    def abandon(self) -> None:
        self.kill()


@dataclass
class Plan:
    """How a start goes.

    Attributes:
        spawn_gate: blocks the spawn until it is set.
        ready: the engine becomes ready by itself; otherwise it waits for `FakeProcess.signals`.
        refuse: the handshake fails with this text.
        ready_response: what the engine reports once it is ready.
    """

    spawn_error: Exception | None = None
    spawn_gate: threading.Event | None = None
    ready: bool = True
    refuse: str = ""
    ready_response: bytes = READY


class FakeEngine(FakeProcess):
    """Implements `Process`, and is the peer of the head's sockets after `wait`."""

    def __init__(self, pid: int, identity: bytes, plan: Plan) -> None:
        super().__init__(pid)
        self.input_addr = ""
        self.identity = identity
        self._plan = plan
        self._sockets: list[zmq.Socket[bytes]] = []

    @property
    def connected(self) -> bool:
        return bool(self._sockets)

    def wait(self, input_addr: str, output_addrs: Sequence[str]) -> None:
        if self._plan.refuse:
            raise ReplicaError(self._plan.refuse)
        if not self._plan.ready and self.process.signals.get(timeout=10) == "ended":
            raise ReplicaError("the engine ended before it was ready")
        sockets = connect(input_addr, output_addrs[0], self.identity)
        sockets[0].send(self._plan.ready_response)
        self.input_addr, self._sockets = input_addr, sockets

    def say(self, frame: bytes) -> None:
        self._sockets[1].send(frame)

    def receive(self) -> list[bytes]:
        return receive(self._sockets[0])

    def disconnect(self) -> None:
        """Close the sockets, as the system does with those of a process before it has exited."""
        for socket in self._sockets:
            socket.close()

    def close(self) -> None:
        self.process.die()
        os.close(self.process.sentinel)
        self.disconnect()


@dataclass
class FakeLauncher(Launcher):
    """Starts without a plan succeed at once. `starts` has the replica ids, in order."""

    plans: dict[int, deque[Plan]] = field(default_factory=dict)
    engines: list[FakeEngine] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ready_timeout: float = 10.0
    ready_timeout_variable: str = "A_VARIABLE"

    def identity(self, replica_id: int) -> bytes:
        return replica_id.to_bytes(2, "little")

    def start(self, replica_id: int) -> FakeEngine:
        self.starts.append(replica_id)
        plans = self.plans.get(replica_id)
        plan = plans.popleft() if plans else Plan()
        if plan.spawn_gate is not None:
            plan.spawn_gate.wait(10)
        if plan.spawn_error is not None:
            raise plan.spawn_error
        engine = FakeEngine(1000 + len(self.engines), self.identity(replica_id), plan)
        self.engines.append(engine)
        return engine

    def plan(self, replica_id: int, *plans: Plan) -> None:
        """Set how the next starts of a replica go."""
        self.plans[replica_id] = deque(plans)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def connect(input_addr: str, output_addr: str, identity: bytes) -> "list[zmq.Socket[bytes]]":
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    sockets = [context.socket(zmq.DEALER), context.socket(zmq.PUSH)]
    sockets[0].setsockopt(zmq.IDENTITY, identity)
    for socket, address in zip(sockets, (input_addr, output_addr), strict=True):
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.connect(address)
    return sockets


def receive(socket: "zmq.Socket[bytes]") -> list[bytes]:
    """Return one message, or fail after ten seconds."""
    if not socket.poll(10_000):
        raise AssertionError("no message arrived")
    return socket.recv_multipart()


class GroupLauncher(FakeLauncher):
    """Implements `GroupedLauncher`: its two engines are ranks of one group."""

    def group_of(self, replica_id: int) -> range:
        return range(2)
