"""How a head receives the changes of a remote replica's prefix cache: long polling over the control connection."""

import asyncio
import struct
from collections.abc import Callable, Sequence

from vllm_omni_plugin.balancing import CacheChange
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.control.lease_messages import CacheChanges, FromServer, PollCache, ToServer
from vllm_omni_plugin.replicas.control.leases import Lease
from vllm_omni_plugin.replicas.kv_events.cache_log import BEGINNING, CacheLog, Cursor

logger = init_logger(__name__)

_KEY_BYTES = 8
PAUSE_S = 0.04
"""Pause between answers. An engine reports changes with each step; one answer per step would load the head too much."""


class CachePollServer:
    """The server's end: answers each `PollCache` once there are changes, with a pause after each round of answers.

    A lease has at most one open poll. Lives on the running event loop.
    """

    def __init__(self, send: Callable[[bytes, FromServer], None]) -> None:
        self._send = send
        self._log = CacheLog()
        self._polls: dict[int, tuple[Lease, Cursor]] = {}
        self._pause: asyncio.TimerHandle | None = None

    def set_log(self, log: CacheLog) -> None:
        """Answer from the log of another engine from now on."""
        self._log.on_change = lambda: None
        self._log = log
        log.on_change = self._answer_all

    def poll(self, lease: Lease, cursor: Cursor) -> None:
        self._polls[lease.lease_id] = (lease, cursor)
        self._answer_all()

    def remove(self, lease: Lease) -> None:
        self._polls.pop(lease.lease_id, None)

    def _answer_all(self) -> None:
        if self._pause is not None:
            return
        answered = [self._answer(lease, cursor) for lease, cursor in list(self._polls.values())]
        if any(answered):
            self._pause = asyncio.get_running_loop().call_later(PAUSE_S, self._end_pause)

    def _end_pause(self) -> None:
        self._pause = None
        self._answer_all()

    def _answer(self, lease: Lease, since: Cursor) -> bool:
        part = self._log.since(since)
        if part is None:
            return False
        del self._polls[lease.lease_id]
        cursor, change = part
        stored, removed = pack_keys(change.stored), pack_keys(change.removed)
        self._send(
            lease.peer, CacheChanges(lease.lease_id, since, cursor, stored, removed, change.restart, change.complete)
        )
        return True


class CachePollClient:
    """The head's end, for one lease."""

    def __init__(self, lease: int, send: Callable[[ToServer], None], on_change: Callable[[CacheChange], None]) -> None:
        self._lease = lease
        self._send = send
        self._on_change = on_change
        self._cursor = BEGINNING
        self.poll()

    def handle(self, message: CacheChanges) -> None:
        """Handle an answer. A second answer to the same poll is ignored."""
        if message.since != self._cursor:
            return
        try:
            change = CacheChange(
                unpack_keys(message.stored), unpack_keys(message.removed), message.restart, message.complete
            )
        except struct.error as error:
            logger.warning("A message about cached blocks was dropped: %s.", error)
            return
        self._cursor = message.cursor
        self._on_change(change)
        self.poll()

    def poll(self) -> None:
        """Request the next changes; `RemoteReplica` repeats it with each heartbeat, as it or its answer may be lost."""
        self._send(PollCache(self._lease, self._cursor))


def pack_keys(keys: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(keys)}Q", *keys)


def unpack_keys(packed: bytes) -> Sequence[int]:
    """Raises `struct.error` if the length is not a multiple of the size of a key."""
    return struct.unpack(f"<{len(packed) // _KEY_BYTES}Q", packed)
