"""What a node asks the head's coordinator before it loads a model. Everything here blocks, for seconds at most."""

import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from secrets import token_hex

import zmq

from vllm_omni_plugin.coordinator.client.coordinator_link import CoordinatorLink
from vllm_omni_plugin.coordinator.client.nonce_responder import answer_with_nonce
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import open_head_dealer
from vllm_omni_plugin.coordinator.protocol.head_messages import (
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

# Shorter than the coordinator's handshake timeout. After that timeout the coordinator ends the connection, which would
# look like a refused secret.
TIMEOUT_S = 0.75 * HANDSHAKE_MS / 1000
"""For the question, a look at what answers in place of the head, and the question again, together. Until the head says
which ports it reaches, `REACHABILITY_TIMEOUT_S` and as much again may pass."""
_NONCE_BYTES = 16

# Of a greeting of ZMTP 3.1 (RFC 37): signature and version, which are answered by a whole one; its ends and mechanism.
_OPENING = b"\xff" + bytes(8) + b"\x7f\x03\x01"
_GREETING_BYTES, _SIGNATURE_ENDS, _MECHANISM = 64, (0xFF, 0x7F), slice(12, 32)


@dataclass(frozen=True)
class HeadQueryResult:
    """What came of a question.

    Attributes:
        info: what the head says; None: nothing.
        problem: why it says nothing, in a clause for the operator.
        refused: whether that is so for good, because the secrets of the two ends differ.
        clock_ahead: seconds that the clock of this machine is ahead of the head's, at least; negative: behind.
        listening: the addresses for which the head was asked whether it reaches them.
        unreached: those that it does not reach, and why; None: it does not say.
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
    *,
    wall_clock: Callable[[], float] = time.time,
) -> HeadQueryResult:
    """Ask the coordinator at a ZMQ address about a stage. A head that cannot be reached is no error.

    Args:
        listening: sockets that listen, by ZMQ address with a numeric host: it is asked whether it reaches the first 32
            of them.
        wall_clock: seconds since the epoch.

    Raises:
        ConfigError: `address` is no address.
    """
    deadline = time.monotonic() + TIMEOUT_S
    tried = dict(islice((listening or {}).items(), MAX_LISTENING))
    question = HeadQuery(stage_id, list(tried), token_hex(_NONCE_BYTES) if tried else "")
    with answer_with_nonce(tried.values(), question.nonce.encode()):
        answer = replace(_ask(address, question, secrets, wall_clock, deadline), listening=question.listening)
    if not answer.refused:
        return answer
    # A relay of connections whose head is away ends them, too, as does a head that is just ending.
    if _demanded(address, deadline) not in ((b"CURVE",) if secrets is None else (b"CURVE", b"NULL")):
        return replace(answer, refused=False, problem=f"what answers at {address} is no head, or not at this moment")
    return _ask(address, HeadQuery(stage_id), secrets, wall_clock, deadline)


def _ask(
    address: str, question: HeadQuery, secrets: Secrets | None, wall_clock: Callable[[], float], deadline: float
) -> HeadQueryResult:
    troubles: list[str] = []
    link = CoordinatorLink(address, open_head_dealer, secrets, troubles.append)
    try:
        frames = deque([encode_from_head(question)])
        sent_at = wall_clock()
        while time.monotonic() < deadline:
            link.wait(deadline, zmq.POLLIN)
            # First: a head may end after its answer.
            with suppress(zmq.Again):
                answer = _read(link.socket.recv(zmq.NOBLOCK), sent_at, wall_clock())
                if answer.info is not None and answer.info.trying:
                    return replace(answer, unreached=_unreached(link, time.monotonic() + 2 * REACHABILITY_TIMEOUT_S))
                return answer
            if troubles and troubles[-1]:
                return HeadQueryResult(problem=troubles[-1], refused=link.refused)
            if frames and link.connected:
                sent_at = wall_clock()
                link.send_all(frames)
    finally:
        link.close(at_once=True)
    silent = "does not know the question, being of an older version, or is too busy" if troubles else "does not answer"
    return HeadQueryResult(problem=f"the head at {address} {silent}")


def _read(frame: bytes, sent_at: float, received_at: float) -> HeadQueryResult:
    try:
        facts = decode_head_info(frame)
    except WireError as error:
        return HeadQueryResult(problem=f"its answer cannot be read ({error})")
    # Its clock was read at some time in between.
    ahead, behind = sent_at - facts.timestamp, facts.timestamp - received_at
    return HeadQueryResult(facts, clock_ahead=max(ahead, 0.0) - max(behind, 0.0))


def _unreached(link: CoordinatorLink, deadline: float) -> Mapping[str, str] | None:
    while link.connected and time.monotonic() < deadline:
        link.wait(deadline, zmq.POLLIN)
        with suppress(zmq.Again, WireError):
            return decode_reachability(link.socket.recv(zmq.NOBLOCK)).unreached
    return None


def _demanded(address: str, deadline: float) -> bytes | None:
    """The mechanism that a ZMQ socket at an address demands, from its greeting; None if nothing greets like one."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    greeting = b""

    def left() -> float:
        return max(0.001, deadline - time.monotonic())

    with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), left()) as connection:
        connection.sendall(_OPENING)
        while len(greeting) < _GREETING_BYTES:
            connection.settimeout(left())
            received = connection.recv(_GREETING_BYTES - len(greeting))
            if not received:
                return None
            greeting += received
        if (greeting[0], greeting[9]) == _SIGNATURE_ENDS:
            return greeting[_MECHANISM].rstrip(b"\0")
    return None
