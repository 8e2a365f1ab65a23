"""What a coordinator takes with many replicas and heads, and how fast it tells heads of each other and of replicas.

    python benchmarks/coordinator.py --replicas 1000 --heads 16 [--secret]

Replicas beat every second, one of them with a change that heads are told of ten times in a second. Each head reports
what it has in flight on 50 replicas 20 times in a second. Two heads are clients as in a fleet, whose delays are
measured; the others send the same frames and read without looking, so that the load does not take the machine's time.
Then a storm: all replicas register at once with a fresh coordinator that so many client heads follow.
"""

import argparse
import multiprocessing
import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import zmq
from processes import percentile, wait_for

from vllm_omni_plugin.coordinator import (
    FullList,
    HeadWork,
    ListDelta,
    OmniCoordClientForHead,
    OmniCoordinatorRuntime,
    ReplicaEvent,
    ReplicaStatus,
    ReplicaWork,
    SessionEvent,
    SessionLost,
    Welcome,
    encode_event,
    engine_key,
)
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import ROLE
from vllm_omni_plugin.coordinator.protocol.head_messages import (
    SESSION_PROTOCOL,
    Beat,
    Hello,
    WorkReport,
    encode_from_head,
)
from vllm_omni_plugin.curve import Secrets, secure_client

MEGABYTE = 1 << 20
REPORTS_PER_S = 20
ROWS_PER_REPORT = 50
CLIENT_HEADS = 2
# A number says when a row was sent, since there is no other place for it: the queue length of a replica, and the tokens
# of a report. It is not larger than such numbers are.
UNIT_S = 1e-4
TIMES = 10**6


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=1000)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--secret", action="store_true", help="authenticate and encrypt the links")
    options = parser.parse_args()
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as folder:
        secret = str(Path(folder, "secret")) if options.secret else None
        if secret:
            os.close(os.open(secret, os.O_CREAT, 0o600))
            Path(secret).write_text(os.urandom(32).hex())
        print(f"secret: {options.secret}; {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
        steady(options, secret)
        storm(options, secret)


def steady(options: argparse.Namespace, secret: str | None) -> None:
    """Load of a running fleet."""
    with ExitStack() as stack:
        runtime = OmniCoordinatorRuntime(heartbeat_timeout=10.0, secret_file=secret)
        stack.callback(runtime.close)
        assert runtime.process_id is not None
        drones = options.heads - CLIENT_HEADS
        stack.enter_context(_generator(_generate, runtime.router_address, secret, options.replicas, drones))
        observers = [
            stack.enter_context(_client(runtime.router_address, f"client-{n}", secret)) for n in range(CLIENT_HEADS)
        ]
        wait_for(lambda: all(len(head.listed) == options.replicas for head in observers), "the list")
        over = threading.Event()
        reporter = threading.Thread(target=_report, args=(observers[0], options.replicas, over))
        reporter.start()
        stack.callback(reporter.join)
        stack.callback(over.set)
        time.sleep(3.0)
        for head in observers:
            head.forget()
        _measure(runtime.process_id, options.seconds)
        for number, head in enumerate(observers):
            print(f"client head {number}: report of another head: {_delays(head.work_delays)}")
            print(f"client head {number}: change of a replica: {_delays(head.list_delays)}")


def storm(options: argparse.Namespace, secret: str | None) -> None:
    """All replicas at once."""
    with ExitStack() as stack:
        runtime = OmniCoordinatorRuntime(heartbeat_timeout=30.0, secret_file=secret)
        stack.callback(runtime.close)
        heads = [
            stack.enter_context(_client(runtime.router_address, f"client-{n}", secret)) for n in range(options.heads)
        ]
        wait_for(lambda: all(head.told_at for head in heads), "the first list")
        began = stack.enter_context(_generator(_register, runtime.router_address, secret, options.replicas))
        wait_for(lambda: all(len(head.listed) == options.replicas for head in heads), "the list")
        last = max(head.told_at for head in heads)
        print(f"storm: {options.heads} heads list all {options.replicas} replicas after {last - began:.2f} s")


class Observer:
    """Measures how old news are when they come. Seconds, monotonic."""

    def __init__(self) -> None:
        self.client: Future[OmniCoordClientForHead] = Future()
        self.listed: set[str] = set()
        self.told_at = 0.0
        self.forget()

    def forget(self) -> None:
        """Begin to measure."""
        self.work_delays: list[float] = []
        self.list_delays: list[float] = []

    def hear(self, event: SessionEvent) -> None:
        """Look at the replica that changes, and at when reports were sent."""
        now = time.monotonic()
        match event:
            case Welcome():
                self.client.result().report_work([], full=True)
            case FullList() | ListDelta():
                gone = self.listed if isinstance(event, FullList) else {key.input_addr for key in event.removed}
                self.listed = (self.listed - gone) | {row.input_addr for row in event.replicas}
                self.told_at = now
                said = next((row.queue_length for row in event.replicas if row.queue_length), None)
                if said is not None:
                    self.list_delays.append(_since(said))
            case HeadWork(full=False):
                self.work_delays += map(_since, {row.prefill_tokens for row in event.work})
            case SessionLost():
                print("a session was lost")


@contextmanager
def _client(address: str, head_id: str, secret: str | None) -> Iterator[Observer]:
    observer = Observer()
    client = OmniCoordClientForHead(address, head_id, observer.hear, secrets=_secrets(secret))
    # The client's thread may have asked for work before this.
    observer.client.set_result(client)
    try:
        yield observer
    finally:
        client.close()


@contextmanager
def _generator(target: Callable[..., None], *args: object) -> Iterator[float]:
    """A process that runs `target` until the end of its pipe; yields when it began."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=target, args=(there, *args))
    process.start()
    try:
        began: float = here.recv()
        yield began
    finally:
        here.send("end")
        process.join()


def _generate(pipe: Connection, address: str, secret: str | None, replicas: int, drones: int) -> None:
    with _dealers(replicas + drones, secret) as sockets:
        for socket in sockets:
            socket.connect(address)
        heads = [_Drone(number, socket, replicas) for number, socket in enumerate(sockets[replicas:])]
        pipe.send(time.monotonic())
        turn = 0
        began = time.monotonic()
        while not pipe.poll(max(0.0, began + turn / REPORTS_PER_S - time.monotonic())):
            for number in range(turn % REPORTS_PER_S, replicas, REPORTS_PER_S):
                sockets[number].send(encode_event(_event(number)))
            if turn % 2:
                sockets[0].send(encode_event(_event(0, _now())))
            for head in heads:
                head.turn(turn)
            turn += 1


def _register(pipe: Connection, address: str, secret: str | None, replicas: int) -> None:
    with _dealers(replicas, secret) as sockets:
        pipe.send(time.monotonic())
        for number, socket in enumerate(sockets):
            socket.connect(address)
            socket.send(encode_event(_event(number)))
        pipe.recv()


@contextmanager
def _dealers(count: int, secret: str | None) -> Iterator[list[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    context.max_sockets = count + 10
    sockets = [context.socket(zmq.DEALER) for _ in range(count)]
    secrets = _secrets(secret)
    for socket in sockets:
        socket.linger = 0
        secure_client(socket, secrets, ROLE)
    yield sockets
    context.destroy(linger=0)


class _Drone:
    """A head that reports and reads without looking."""

    def __init__(self, number: int, socket: "zmq.Socket[bytes]", replicas: int) -> None:
        self._head_id = f"drone-{number}"
        self._socket = socket
        self._replicas = replicas

    def turn(self, turn: int) -> None:
        """Do what is to be done 20 times in a second."""
        if turn == 0:
            self._socket.send(encode_from_head(Hello(self._head_id, 1, SESSION_PROTOCOL)))
        elif turn % REPORTS_PER_S == 0:
            self._socket.send(encode_from_head(Beat()))
        self._socket.send(encode_from_head(WorkReport(turn == 0, _rows(turn, self._replicas) if turn else [])))
        while self._socket.poll(0):
            self._socket.recv(copy=False)


def _report(head: Observer, replicas: int, over: threading.Event) -> None:
    client = head.client.result()
    turn = 0
    while not over.wait(1 / REPORTS_PER_S):
        turn += 1
        client.report_work(_rows(turn, replicas), full=False)


def _rows(turn: int, replicas: int) -> list[ReplicaWork]:
    now = _now()
    numbers = [(turn * ROWS_PER_REPORT + row) % replicas for row in range(ROWS_PER_REPORT)]
    return [ReplicaWork(engine_key(0, *_addresses(number), 1), turn % 9 + 1, now) for number in numbers]


def _now() -> int:
    return int(time.monotonic() / UNIT_S) % TIMES


def _since(sent: int) -> float:
    return (_now() - sent) % TIMES * UNIT_S


def _addresses(number: int) -> tuple[str, str]:
    host = f"tcp://10.20.{number // 250}.{number % 250}"
    return f"{host}:40001", f"{host}:40002"


def _event(number: int, queue_length: int = 0) -> ReplicaEvent:
    control = _addresses(number)[0] + "0"
    return ReplicaEvent(*_addresses(number), 0, "update", ReplicaStatus.UP, queue_length, 1, time.time_ns(), control)


def _measure(pid: int, seconds: float) -> None:
    process = psutil.Process(pid)
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(seconds)
    after, elapsed = process.cpu_times(), time.monotonic() - began
    share = (after.user + after.system - before.user - before.system) / elapsed
    print(f"coordinator: {share:.1%} of one core, {process.memory_info().rss / MEGABYTE:.0f} MB")


def _delays(values: list[float]) -> str:
    if not values:
        return "none"
    p50, p99 = percentile(values, 0.5) * 1e3, percentile(values, 0.99) * 1e3
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms of {len(values)}"


def _secrets(file: str | None) -> Secrets | None:
    return Secrets.from_file(file) if file else None


if __name__ == "__main__":
    main()
