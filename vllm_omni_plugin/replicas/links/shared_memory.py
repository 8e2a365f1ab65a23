"""Passes large frames between two processes of a node through shared memory instead of a socket.

The memory has no name (memfd_create(2)): it is inherited, no other process can open it, and it is freed with the two
processes. Pages are reused, because new pages cost more than a socket. A frame stays in the memory until the receiver
drops its last reference; a flag byte for each unit tells the sender.
"""

import ctypes
import fcntl
import mmap
import os
import weakref
from bisect import insort
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

MEMORY_NAME = "vllm-omni-frames"
"""Shown in lists of mappings and descriptors; it cannot be opened by this name."""

_UNIT = 512 << 10
"""Unit of allocation in bytes. Smaller frames go through the socket."""

_UNITS = 256
"""Units in each direction: 128 MiB. Only pages that were used take memory."""

_LARGEST = 32 << 20
"""Largest frame in bytes. Copying blocks the sender for 0.1 ms per MiB, while a socket copies in its own thread."""

_FLAGS = 4096
"""Bytes before the first unit, one flag for each unit: in use. At least `_UNITS`, and whole pages."""

_SIZE = _FLAGS + _UNITS * _UNIT

Loan = tuple[int, int, int]
"""Index of the frame in its message, first unit, bytes."""

_LOANS = msgspec.msgpack.Decoder(list[Loan])


class SharedMemory:
    """One end of the memory. Not thread-safe, but received frames may be dropped on any thread.

    A message with frames in memory begins with an empty frame, as no other message does, and the list of its loans.
    `fd` comes from `new_shared_memory` and may be closed afterwards. Raises `OSError`.
    """

    def __init__(self, fd: int, end: Literal[0, 1]) -> None:
        self._outgoing = mmap.mmap(fd, _SIZE, offset=end * _SIZE)
        self._incoming = mmap.mmap(fd, _SIZE, offset=(1 - end) * _SIZE)
        self._lent: list[tuple[int, int]] = []
        """First unit and end unit of each loan, in order."""

    def lend(self, frames: Sequence[Any]) -> list[Any]:
        """Copy large frames into the memory, if there is room; returns the message to send instead."""
        sent = list(frames)
        loans: list[Loan] = []
        for index, frame in enumerate(frames):
            data = memoryview(frame)
            if _UNIT <= data.nbytes <= _LARGEST and (unit := self._place(-(-data.nbytes // _UNIT))) is not None:
                start = _FLAGS + unit * _UNIT
                memoryview(self._outgoing)[start : start + data.nbytes] = data.cast("B")
                self._outgoing[unit] = True
                sent[index] = b""
                loans.append((index, unit, data.nbytes))
        return [b"", msgspec.msgpack.encode(loans), *sent] if loans else sent

    def restore(self, frames: Sequence[Any]) -> list[Any]:
        """Return the original of a received message. Its frames stay in the memory until the last reference is dropped.

        A frame with an invalid loan stays empty; a tensor in a frame is never empty.
        """
        if len(frames) < 2 or memoryview(frames[0]).nbytes:
            return list(frames)
        message = list(frames[2:])
        try:
            loans = _LOANS.decode(frames[1])
        except msgspec.MsgspecError:
            return message
        for index, unit, size in loans:
            if 0 <= index < len(message) and 0 <= unit < _UNITS and 0 < size <= (_UNITS - unit) * _UNIT:
                message[index] = self._borrowed(unit, size)
        return message

    def _place(self, units: int) -> int | None:
        """Reserve the first gap of this size, so that used pages are reused first; None if there is no gap."""
        self._lent = [loan for loan in self._lent if self._outgoing[loan[0]]]
        start = 0
        for first, behind in self._lent:
            if first - start >= units:
                break
            start = behind
        if start + units > _UNITS:
            return None
        insort(self._lent, (start, start + units))
        return start

    def _borrowed(self, unit: int, size: int) -> Any:
        buffer = (ctypes.c_ubyte * size).from_buffer(self._incoming, _FLAGS + unit * _UNIT)
        weakref.finalize(buffer, _give_back, self._incoming, unit, os.getpid()).atexit = False
        return buffer


def _give_back(flags: mmap.mmap, unit: int, borrower: int) -> None:
    # Dropped references in a fork of the borrower do not count.
    if os.getpid() == borrower:
        flags[unit] = False


def new_shared_memory() -> int:
    """Create memory for two ends; returns its descriptor. Its size is sealed. Raises `OSError`."""
    fd = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 2 * _SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd
