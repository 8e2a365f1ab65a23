"""Engines of a replica server: real ipc sockets and a thread that answers, controlled by the test."""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq

from tests.fakes.engine_api import DEAD_FRAME, FakeOutput, FakeOutputs, FakeResult, FakeUtilityOutput
from tests.fakes.engines import READY, FakeLauncher, FakeProcess, connect
from vllm_omni_plugin.errors import ReplicaError


class ServedFakeEngine(FakeProcess):
    """Implements `Process`. Answers utility calls with False.

    Attributes:
        frames: all received messages, in order.
        added, aborted: ids of added and of aborted requests.
        calls: (client index, method) of the utility calls.
        failure: failure message of utility calls instead of a result.
        sleeps: the result of utility calls.
    """

    def __init__(self, pid: int, identity: bytes, fails: bool = False, ready: bytes = READY) -> None:
        super().__init__(pid)
        self.frames: list[list[bytes]] = []
        self.added: list[str] = []
        self.aborted: list[str] = []
        self.calls: list[tuple[int, str]] = []
        self.failure: str | None = None
        self.sleeps = False
        self._identity = identity
        self._fails = fails
        self._ready = ready
        self._hung = False
        self._actions: deque[Callable[[], None]] = deque()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC)
        self._over = False
        self._thread: threading.Thread | None = None

    def wait(self, input_addr: str, output_addrs: Sequence[str]) -> None:
        if self._fails:
            raise ReplicaError("the engine did not start")
        self._dealer, first = connect(input_addr, output_addrs[0], self._identity)
        self._outputs = [first, *(_push(address) for address in output_addrs[1:])]
        self._dealer.send(self._ready)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def hang(self) -> None:
        """Neither read nor answer until `recover`."""
        self._run_on_thread(lambda: setattr(self, "_hung", True))

    def recover(self) -> None:
        self._run_on_thread(lambda: setattr(self, "_hung", False))

    def send_tokens(self, slot: int, *request_ids: str) -> None:
        """Send one message with one token for each request on the output of a slot."""
        frames = [msgspec.json.encode(FakeOutputs(outputs=[FakeOutput(request_id)])) for request_id in request_ids]
        self._run_on_thread(lambda: self._send(self._outputs[slot : slot + 1], frames))

    def report_death(self) -> None:
        self._run_on_thread(lambda: self._send(self._outputs, [DEAD_FRAME]))

    def close(self) -> None:
        self.process.die()
        os.close(self.process.sentinel)
        if self._thread is not None:
            self._run_on_thread(lambda: setattr(self, "_over", True))
            self._thread.join()
        os.close(self._wakeup)

    def _send(self, outputs: "list[zmq.Socket[bytes]]", frames: list[bytes]) -> None:
        for output in outputs:
            for frame in frames:
                output.send(frame)

    def _run_on_thread(self, action: Callable[[], None]) -> None:
        self._actions.append(action)
        os.eventfd_write(self._wakeup, 1)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wakeup, zmq.POLLIN)
        while not self._over:
            poller.register(self._dealer, 0 if self._hung else zmq.POLLIN)
            for source, _ in poller.poll():
                if source is self._dealer:
                    self._receive(self._dealer.recv_multipart())
                else:
                    os.eventfd_read(self._wakeup)
                    while self._actions:
                        self._actions.popleft()()
        for socket in (self._dealer, *self._outputs):
            socket.close()

    def _receive(self, frames: list[bytes]) -> None:
        self.frames.append(frames)
        body = msgspec.json.decode(frames[1])
        if frames[0] == b"abort":
            self.aborted += body
        elif frames[0] == b"add":
            self.added.append(body["request_id"])
        elif frames[0] == b"utility":
            call_id, method, _ = body
            client_index = int(frames[2])
            self.calls.append((client_index, method))
            reply = FakeOutputs(utility_output=FakeUtilityOutput(call_id, self.failure, FakeResult(self.sleeps)))
            self._outputs[client_index].send(msgspec.json.encode(reply))


@dataclass
class ServedFakeLauncher(FakeLauncher):
    """A `FakeLauncher` of `ServedFakeEngine`s.

    Attributes:
        failing: number of next starts that fail.
        trouble: errors that the next starts raise.
        ready: ready response of the next engines.
    """

    engines: list[ServedFakeEngine] = field(default_factory=list)  # type: ignore[assignment]
    failing: int = 0
    trouble: list[Exception] = field(default_factory=list)
    ready: bytes = READY

    def start(self, replica_id: int) -> ServedFakeEngine:  # type: ignore[override]
        if self.trouble:
            raise self.trouble.pop()
        number = 1000 + len(self.engines)
        engine = ServedFakeEngine(number, self.identity(replica_id), self.failing > 0, self.ready)
        self.failing -= 1
        self.engines.append(engine)
        return engine


def _push(address: str) -> "zmq.Socket[bytes]":
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.connect(address)
    return socket
