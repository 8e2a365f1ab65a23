"""Large frames between two processes of a node, through memory that both have mapped instead of through a socket.

The memory has no name (memfd_create(2)): it is inherited, nobody else can open it, and it ends with the two processes
however they end. It is used again and again, because fresh pages cost more than a socket does: what was sent stands in
it until the receiver drops the last reference, and a byte for each place tells the sender of that.
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
"""What lists of mappings and descriptors show; it finds nothing."""

_UNIT = 512 << 10
"""Bytes. Smaller frames are not worth it; places begin at multiples of it."""

_UNITS = 256
"""128 MiB in each direction. Only what was used at once takes memory."""

_LARGEST = 32 << 20
"""Bytes. The sender waits while it copies, about 0.1 ms for each MiB; a socket copies on a thread of its own."""

_FLAGS = 4096
"""Bytes before the first unit: whether what begins at a unit is still lent. At least `_UNITS`, and whole pages."""

_SIZE = _FLAGS + _UNITS * _UNIT

Loan = tuple[int, int, int]
"""Index of the frame in its message, first unit, bytes."""

_LOANS = msgspec.msgpack.Decoder(list[Loan])


class SharedMemory:
    """One end of the memory. Not thread-safe, but what was taken may be dropped on any thread.

    A message of which something is lent begins with an empty frame, which no other one does, and the list of its loans.

    Args:
        fd: what `new_shared_memory` made; may be closed afterwards.
        end: which of the two ends this is.

    Raises:
        OSError: it cannot be mapped.
    """

    def __init__(self, fd: int, end: Literal[0, 1]) -> None:
        self._outgoing = mmap.mmap(fd, _SIZE, offset=end * _SIZE)
        self._incoming = mmap.mmap(fd, _SIZE, offset=(1 - end) * _SIZE)
        self._lent: list[tuple[int, int]] = []
        """First unit and the one behind the last of each loan, in order."""

    def lend(self, frames: Sequence[Any]) -> list[Any]:
        """What to send in place of a message: large frames are copied here, unless there is no room for them."""
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

    def take(self, frames: Sequence[Any]) -> list[Any]:
        """The message behind what came; what is lent stays so until nothing refers to it.

        A frame whose loan is none stays empty, which no tensor is that travels as a frame.
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
        """The first gap of so many units, so that pages which have been used before are used first."""
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
    # A fork of the borrower has references of its own, which say nothing of those of the borrower.
    if os.getpid() == borrower:
        flags[unit] = False


def new_shared_memory() -> int:
    """A descriptor of new memory for two ends, neither of which can make it smaller under the other.

    Raises:
        OSError: there is none.
    """
    fd = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 2 * _SIZE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except BaseException:
        os.close(fd)
        raise
    return fd
