"""The query of a node to a head's coordinator before the node loads a model. It blocks for up to 1.5 s."""

import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import zmq

from vllm_omni_plugin.coordinator.client.coordinator_link import CoordinatorLink
from vllm_omni_plugin.coordinator.protocol import head_messages as wire
from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import open_head_dealer
from vllm_omni_plugin.curve import HANDSHAKE_MS, Secrets
from vllm_omni_plugin.errors import WireError

# For all attempts together. Shorter than the coordinator's handshake timeout: after that timeout the coordinator ends
# the connection, which would look like a refused secret.
TIMEOUT_S = 0.75 * HANDSHAKE_MS / 1000


@dataclass(frozen=True)
class HeadQueryResult:
    """The result of a `HeadQuery`.

    Attributes:
        problem: Why there is no answer, as a clause.
        refused: Whether the handshakes with all secrets failed. Then the head has another secret, or what answers there
            is no head, such as a proxy whose head is away.
        clock_ahead: Lower bound of the seconds by which this machine's clock is ahead of the head's; negative: behind.
    """

    info: wire.HeadInfo | None = None
    problem: str = ""
    refused: bool = False
    clock_ahead: float = 0.0


def query_head(
    address: str,
    stage_id: int,
    secrets: Secrets | None,
    host_slots: Sequence[str] = (),
    *,
    wall_clock: Callable[[], float] = time.time,
) -> HeadQueryResult:
    """Query the coordinator about a stage; numbers the first 1,024 ``host_slots``. Raises only `ConfigError`."""
    deadline = time.monotonic() + TIMEOUT_S
    problems: list[str] = []
    link = CoordinatorLink(address, open_head_dealer, secrets, problems.append)
    try:
        frames = deque([wire.encode_from_head(wire.HeadQuery(stage_id, tuple(host_slots[: wire.MAX_HOST_SLOTS])))])
        sent_at = wall_clock()
        while time.monotonic() < deadline:
            link.wait(deadline, zmq.POLLIN)
            # Before the check for problems: a head may end after its answer.
            with suppress(zmq.Again):
                return _read(link.socket.recv(zmq.NOBLOCK), sent_at, wall_clock())
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
        info = wire.decode_head_info(frame)
    except WireError as error:
        return HeadQueryResult(problem=f"its answer cannot be read ({error})")
    # The head read its clock between these two times.
    ahead, behind = sent_at - info.timestamp, info.timestamp - received_at
    return HeadQueryResult(info, clock_ahead=max(ahead, 0.0) - max(behind, 0.0))
