"""The query of a node to a head's coordinator before the node loads a model. All functions block for some seconds."""

import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from secrets import token_hex

import zmq

from vllm_omni_plugin.coordinator.client.coordinator_link import CoordinatorLink
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import Wakeup, open_head_dealer
from vllm_omni_plugin.coordinator.protocol.head_messages import (
    MAX_HOST_SLOTS,
    MAX_LISTENING,
    REACHABILITY_TIMEOUT_S,
    HeadInfo,
    HeadQuery,
    decode_head_info,
    decode_reachability,
    encode_from_head,
)
from vllm_omni_plugin.curve import HANDSHAKE_MS, Secrets
from vllm_omni_plugin.errors import WireError

# For all attempts together; the wait for a `ReachabilityReport` is extra. Shorter than the coordinator's handshake
# timeout: after that timeout the coordinator ends the connection, which would look like a refused secret.
TIMEOUT_S = 0.75 * HANDSHAKE_MS / 1000
_NONCE_BYTES = 16

# Of a ZMTP 3.1 greeting (RFC 37): signature and version, which a ZMQ socket answers with its whole greeting; the ends
# of its signature, and the position of its mechanism.
_OPENING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_GREETING_BYTES, _SIGNATURE_ENDS, _MECHANISM = 64, (0xFF, 0x7F), slice(12, 32)


@dataclass(frozen=True)
class HeadQueryResult:
    """The result of a `HeadQuery`.

    Attributes:
        problem: Why there is no answer, as a clause.
        refused: Whether the head refused the secret.
        clock_ahead: Lower bound of the seconds by which this machine's clock is ahead of the head's; negative: behind.
        listening: The addresses that the head was asked to reach.
        unreached: The reason for each of them that the head does not reach; None if the head did not check.
    """

    info: HeadInfo | None = None
    problem: str = ""
    refused: bool = False
    clock_ahead: float = 0.0
    listening: Sequence[str] = ()
    unreached: Mapping[str, str] | None = None


def query_head(
    address: str,
    stage_id: int,
    secrets: Secrets | None,
    listening: Mapping[str, socket.socket] | None = None,
    host_slots: Sequence[str] = (),
    *,
    wall_clock: Callable[[], float] = time.time,
) -> HeadQueryResult:
    """Query the coordinator at a ZMQ address about a stage. Raises `ConfigError` only if it is no address.

    ``listening``: sockets by ZMQ address with a numeric host. The head checks whether it reaches the first 32 of them.
    ``host_slots``: see `HeadQuery`; the head numbers the first 1,024 of them.
    """
    deadline = time.monotonic() + TIMEOUT_S
    checked = dict(islice((listening or {}).items(), MAX_LISTENING))
    nonce = token_hex(_NONCE_BYTES) if checked else ""
    query = HeadQuery(stage_id, list(checked), nonce, tuple(host_slots[:MAX_HOST_SLOTS]))
    with answer_with_nonce(checked.values(), query.nonce.encode()):
        result = replace(_query(address, query, secrets, wall_clock, deadline), listening=query.listening)
    if not result.refused:
        return result
    # A TCP proxy whose head is away, and a head that is shutting down, end connections as a refusing head does.
    if _mechanism_at(address, deadline) not in ((b"CURVE",) if secrets is None else (b"CURVE", b"NULL")):
        return replace(result, refused=False, problem=f"what answers at {address} is no head, or not at this moment")
    return _query(address, HeadQuery(stage_id), secrets, wall_clock, deadline)


@contextmanager
def answer_with_nonce(listening: Collection[socket.socket], nonce: bytes) -> Iterator[None]:
    """While the context is open, a thread sends the nonce on each connection to these sockets and closes it."""
    done = Wakeup()
    thread = threading.Thread(target=_send_nonce, args=(listening, nonce, done), name="omni-nonce", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        done.close()


def _send_nonce(listening: Collection[socket.socket], nonce: bytes, done: Wakeup) -> None:
    by_descriptor = {each.fileno(): each for each in listening}
    poll = select.poll()
    for descriptor in (*by_descriptor, done.fileno()):
        poll.register(descriptor, select.POLLIN)
    while True:
        for descriptor, _ in poll.poll():
            if descriptor == done.fileno():
                return
            # The peer may have closed the connection.
            with suppress(OSError):
                connection, _ = by_descriptor[descriptor].accept()
                with connection:
                    connection.sendall(nonce)


def _query(
    address: str, query: HeadQuery, secrets: Secrets | None, wall_clock: Callable[[], float], deadline: float
) -> HeadQueryResult:
    problems: list[str] = []
    link = CoordinatorLink(address, open_head_dealer, secrets, problems.append)
    try:
        frames = deque([encode_from_head(query)])
        sent_at = wall_clock()
        while time.monotonic() < deadline:
            link.wait(deadline, zmq.POLLIN)
            # Before the check for problems: a head may end after its answer.
            with suppress(zmq.Again):
                result = _read(link.socket.recv(zmq.NOBLOCK), sent_at, wall_clock())
                if result.info is not None and result.info.trying:
                    return replace(result, unreached=_unreached(link, time.monotonic() + 2 * REACHABILITY_TIMEOUT_S))
                return result
            if problems and problems[-1]:
                return HeadQueryResult(problem=problems[-1], refused=link.refused)
            if frames and link.connected:
                sent_at = wall_clock()
                link.send_all(frames)
    finally:
        link.close(at_once=True)
    silence = "does not know the query (older version) or is too busy" if problems else "does not answer"
    return HeadQueryResult(problem=f"the head at {address} {silence}")


def _read(frame: bytes, sent_at: float, received_at: float) -> HeadQueryResult:
    try:
        info = decode_head_info(frame)
    except WireError as error:
        return HeadQueryResult(problem=f"its answer cannot be read ({error})")
    # The head read its clock between these two times.
    ahead, behind = sent_at - info.timestamp, info.timestamp - received_at
    return HeadQueryResult(info, clock_ahead=max(ahead, 0.0) - max(behind, 0.0))


def _unreached(link: CoordinatorLink, deadline: float) -> Mapping[str, str] | None:
    while link.connected and time.monotonic() < deadline:
        link.wait(deadline, zmq.POLLIN)
        with suppress(zmq.Again, WireError):
            return decode_reachability(link.socket.recv(zmq.NOBLOCK)).unreached
    return None


def _mechanism_at(address: str, deadline: float) -> bytes | None:
    """Return the security mechanism in the greeting of the ZMQ socket at an address; None without a greeting."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    greeting = b""

    def remaining() -> float:
        return max(0.001, deadline - time.monotonic())

    with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), remaining()) as connection:
        connection.sendall(_OPENING)
        while len(greeting) < _GREETING_BYTES:
            connection.settimeout(remaining())
            received = connection.recv(_GREETING_BYTES - len(greeting))
            if not received:
                return None
            greeting += received
        if (greeting[0], greeting[9]) == _SIGNATURE_ENDS:
            return greeting[_MECHANISM].rstrip(b"\0")
    return None
