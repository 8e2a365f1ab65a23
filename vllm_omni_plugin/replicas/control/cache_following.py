"""How a head follows what a remote replica has cached: long polling over the control link, from both ends."""

import asyncio
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from vllm_omni_plugin.balancing import CacheChange
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.control.lease_messages import MAX_PART, CacheChanges, Follow, FromServer, ToServer
from vllm_omni_plugin.replicas.control.leases import Lease

logger = init_logger(__name__)

_KEY_BYTES = 8
_PAUSE_S = 0.04
"""Between answers: an engine reports with each step, and a head that took each report would do little else."""
_MOST_UNTOLD = 65_536
"""Changes kept for a head that does not ask, beside as many as there are blocks; then it is told all of these anew."""


@dataclass(slots=True)
class _Reader:
    """What the head of one lease has yet to be told.

    Attributes:
        lease: the head's.
        changes: blocks, each with whether it is cached now.
        restart: whether the next part is the first of all there is.
        part: the last one, which the head may not have got; None: it has.
        parts: how many were made.
        asks: whether it waits for one.
    """

    lease: Lease
    changes: dict[int, bool]
    restart: bool
    part: CacheChanges | None = None
    parts: int = 0
    asks: bool = True


class CacheFollowers:
    """The server's end: answers each `Follow` when there is something to tell, at once after a quiet time and then in
    intervals. One may be open for each lease. Lives on the running event loop.

    Args:
        send: sends a message to a routing id of the control link.
    """

    def __init__(self, send: Callable[[bytes, FromServer], None]) -> None:
        self._send = send
        self._readers: dict[int, _Reader] = {}
        self._pause: asyncio.TimerHandle | None = None
        self.begin()

    def begin(self) -> None:
        """A new engine, which has reported nothing. No lease may be left."""
        self._cached: set[int] = set()
        self._begun = self._complete = False

    def take(self, change: CacheChange) -> None:
        """The engine has reported; the first time with a restart."""
        self._begun, self._complete = True, change.complete
        if change.restart:
            self._cached.clear()
        self._cached.difference_update(change.removed)
        self._cached.update(change.stored)
        news = dict.fromkeys(change.removed, False) | dict.fromkeys(change.stored, True)
        for reader in self._readers.values():
            reader.changes |= news
            if change.restart or len(reader.changes) > len(self._cached) + _MOST_UNTOLD:
                reader.restart, reader.changes = True, dict.fromkeys(self._cached, True)
        self._answer_all()

    def follow(self, lease: Lease, received: int) -> None:
        """A head asks for what comes after so many parts."""
        reader = self._readers.get(lease.lease_id)
        if reader is None:
            reader = self._readers[lease.lease_id] = _Reader(lease, dict.fromkeys(self._cached, True), self._begun)
        if received == reader.parts:
            reader.part = None
        reader.asks = True
        self._answer_all()

    def forget(self, lease: Lease) -> None:
        """The lease has ended."""
        self._readers.pop(lease.lease_id, None)

    def _answer_all(self) -> None:
        if self._pause is not None:
            return
        answered = [self._answer(reader) for reader in self._readers.values()]
        if any(answered):
            self._pause = asyncio.get_running_loop().call_later(_PAUSE_S, self._go_on)

    def _go_on(self) -> None:
        self._pause = None
        self._answer_all()

    def _answer(self, reader: _Reader) -> bool:
        if not reader.asks or not (reader.part or reader.changes or reader.restart):
            return False
        reader.asks = False
        reader.part = reader.part or self._next_part(reader)
        self._send(reader.lease.peer, reader.part)
        return True

    def _next_part(self, reader: _Reader) -> CacheChanges:
        told = {key: reader.changes.pop(key) for key in list(islice(reader.changes, MAX_PART))}
        stored = pack_keys([key for key, is_cached in told.items() if is_cached])
        removed = pack_keys([key for key, is_cached in told.items() if not is_cached])
        restart, reader.restart = reader.restart, False
        reader.parts += 1
        return CacheChanges(reader.lease.lease_id, reader.parts, stored, removed, restart, self._complete)


class CacheFollower:
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
        self._received = 0
        self.ask()

    def take(self, message: CacheChanges) -> None:
        """An answer has come. One that came before, because it was asked for twice, is ignored."""
        if message.part != self._received + 1:
            return
        try:
            change = CacheChange(
                unpack_keys(message.stored), unpack_keys(message.removed), message.restart, message.complete
            )
        except struct.error as error:
            logger.warning("A message about cached blocks was dropped: %s.", error)
            return
        self._received = message.part
        self._on_change(change)
        self.ask()

    def ask(self) -> None:
        """Ask for what comes next; again, now and then, because the question or its answer may have been lost."""
        self._send(Follow(self._lease, self._received))


def pack_keys(keys: Sequence[int]) -> bytes:
    """Block keys as the control link carries them."""
    return struct.pack(f"<{len(keys)}Q", *keys)


def unpack_keys(packed: bytes) -> Sequence[int]:
    """The keys in `packed`. Raises `struct.error` unless it has eight bytes for each."""
    return struct.unpack(f"<{len(packed) // _KEY_BYTES}Q", packed)
