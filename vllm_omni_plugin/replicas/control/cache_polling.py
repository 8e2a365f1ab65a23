"""How a head follows what a remote replica has cached: long polling over the control link, from both ends."""

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
_PAUSE_S = 0.04
"""Between answers: an engine reports with each step, and a head that took each report would do little else."""


class CachePollServer:
    """The server's end: answers each `PollCache` once there are changes, with a pause after each round of answers.

    A lease has at most one open poll. Lives on the running event loop.

    Args:
        send: sends a message to a routing id of the control link.
    """

    def __init__(self, send: Callable[[bytes, FromServer], None]) -> None:
        self._send = send
        self._log = CacheLog()
        self._waiting: dict[int, tuple[Lease, Cursor]] = {}
        self._pause: asyncio.TimerHandle | None = None

    def read(self, log: CacheLog) -> None:
        """Tell of this engine from now on."""
        self._log.on_change = lambda: None
        self._log = log
        log.on_change = self._answer_all

    def follow(self, lease: Lease, cursor: Cursor) -> None:
        """A head asks for what comes after its cursor."""
        self._waiting[lease.lease_id] = (lease, cursor)
        self._answer_all()

    def forget(self, lease: Lease) -> None:
        """The lease has ended."""
        self._waiting.pop(lease.lease_id, None)

    def _answer_all(self) -> None:
        if self._pause is not None:
            return
        answered = [self._answer(lease, cursor) for lease, cursor in list(self._waiting.values())]
        if any(answered):
            self._pause = asyncio.get_running_loop().call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._answer_all()

    def _answer(self, lease: Lease, since: Cursor) -> bool:
        part = self._log.since(since)
        if part is None:
            return False
        del self._waiting[lease.lease_id]
        cursor, change = part
        stored, removed = pack_keys(change.stored), pack_keys(change.removed)
        self._send(
            lease.peer, CacheChanges(lease.lease_id, since, cursor, stored, removed, change.restart, change.complete)
        )
        return True


class CachePollClient:
    """The head's end, for one lease.

    Args:
        lease: its number.
        send: sends a message on the control link.
        on_change: told of every change, in order.
    """

    def __init__(self, lease: int, send: Callable[[ToServer], None], on_change: Callable[[CacheChange], None]) -> None:
        self._lease = lease
        self._send = send
        self._on_change = on_change
        self._cursor = BEGINNING
        self.ask()

    def take(self, message: CacheChanges) -> None:
        """An answer has come. One that came before, because it was asked for twice, is ignored."""
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
        self.ask()

    def ask(self) -> None:
        """Ask for what comes next; again, now and then, because the question or its answer may have been lost."""
        self._send(PollCache(self._lease, self._cursor))


def pack_keys(keys: Sequence[int]) -> bytes:
    """Block keys as the control link carries them."""
    return struct.pack(f"<{len(keys)}Q", *keys)


def unpack_keys(packed: bytes) -> Sequence[int]:
    """The keys in `packed`. Raises `struct.error` unless it has eight bytes for each."""
    return struct.unpack(f"<{len(packed) // _KEY_BYTES}Q", packed)
