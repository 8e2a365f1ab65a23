"""Counts dropped frames, and logs the first of each peer and reason."""

from collections import Counter
from enum import StrEnum

import zmq

from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)

MAX_LOGGED_PEERS = 1024


class DropReason(StrEnum):
    MULTIPART = "multipart"
    MALFORMED = "malformed"
    STALE = "stale"
    TABLE_FULL = "table-full"
    TOPICS = "topics"


def peer_of(frame: zmq.Frame) -> str:
    try:
        return str(frame.get("Peer-Address")) or "on this machine"
    except zmq.ZMQError:
        # libzmq does not know the address of a peer with libzmq 3 or older.
        return "without an address"


class DropLog:
    """Counts dropped frames by reason. Logs at most ``max_peers`` different pairs of peer and reason."""

    def __init__(self, max_peers: int = MAX_LOGGED_PEERS) -> None:
        self._max_peers = max_peers
        self._logged: set[tuple[str, DropReason]] = set()
        self._counts: Counter[DropReason] = Counter()

    @property
    def counts(self) -> dict[str, int]:
        return {reason.value: self._counts[reason] for reason in DropReason}

    def record(self, reason: DropReason, peer: str, detail: str) -> None:
        """Count one dropped frame of the peer with this network address."""
        self._counts[reason] += 1
        if (peer, reason) in self._logged or len(self._logged) >= self._max_peers:
            return
        self._logged.add((peer, reason))
        logger.warning(
            "Dropped a frame of peer %r (%s): %r; more of its kind are counted, not logged", peer, reason, detail
        )
        if len(self._logged) == self._max_peers:
            logger.warning(
                "Dropped frames of %d peers; those of further peers are counted, not logged", self._max_peers
            )
