"""Large frames go through memory, are not overwritten while anybody refers to them, and leave nothing behind."""

import gc
import os
from random import Random
from typing import Any

import msgspec
import pytest

from tests.fakes.mappings import descriptors, mappings
from vllm_omni_plugin.replicas.links.shared_memory import SharedMemory, new_shared_memory

MIB = 1 << 20
ALL_LARGE = 4
"""Of the largest frames, as many as there is room for."""
LARGE = b"x" * 32 * MIB

Ends = tuple[SharedMemory, SharedMemory]


@pytest.fixture
def ends() -> Ends:
    fd = new_shared_memory()
    try:
        return SharedMemory(fd, 0), SharedMemory(fd, 1)
    finally:
        os.close(fd)


def sent_bytes(frames: list[Any]) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)


@pytest.mark.parametrize("swapped", [False, True])
def test_large_frames_are_not_sent_but_arrive_unchanged(ends: Ends, swapped: bool) -> None:
    sender, receiver = reversed(ends) if swapped else ends
    message = [b"\x00", b"body", b"a" * MIB, b"b" * 1000, bytearray(b"c" * (3 * MIB + 5))]
    sent = sender.lend(message)
    assert sent_bytes(sent) < 1100
    assert [bytes(frame) for frame in receiver.restore(sent)] == [bytes(frame) for frame in message]


@pytest.mark.parametrize("message", [[b""], [b"body"], [b"\x00", b""], [b"a", b"b" * 100_000], [b"body", LARGE + b"x"]])
def test_small_and_too_large_frames_are_sent_unchanged(ends: Ends, message: list[bytes]) -> None:
    assert ends[0].lend(message) == message
    assert ends[1].restore(message) == message


def test_large_frames_are_sent_while_the_memory_is_full(ends: Ends) -> None:
    sender, receiver = ends
    held = [receiver.restore(sender.lend([b"body", LARGE])) for _ in range(ALL_LARGE)]
    full = sender.lend([b"body", LARGE])
    assert full == [b"body", LARGE]
    view = memoryview(held.pop()[1])
    assert sender.lend([b"body", LARGE]) == full, "a view still refers to it"
    del view
    assert sent_bytes(sender.lend([b"body", LARGE])) < 100


def test_held_frames_never_change(ends: Ends) -> None:
    rng = Random(7)
    sender, receiver = ends
    held: list[tuple[Any, bytes, int]] = []
    lent = 0
    for number in range(150):
        mark, size = number.to_bytes(4, "little"), rng.randrange(MIB, 24 * MIB)
        frame = bytearray(size)
        frame[:4] = frame[-4:] = mark
        sent = sender.lend([b"body", frame])
        lent += sent_bytes(sent) < 100
        held.append((receiver.restore(sent)[1], mark, size))
        while len(held) > 10 or (held and rng.random() < 0.4):
            data, mark, size = held.pop(rng.randrange(len(held)))
            view = memoryview(data)
            assert (bytes(view[:4]), bytes(view[-4:]), view.nbytes) == (mark, mark, size)
            del data, view
    assert 75 < lent < 150


FORGED = {
    "no list": b"\xc1",
    "text": msgspec.msgpack.encode([("/etc/passwd", 0, MIB)]),
    "a frame that is not there": msgspec.msgpack.encode([(1, 0, MIB)]),
    "a negative frame": msgspec.msgpack.encode([(-1, 0, MIB)]),
    "a negative unit": msgspec.msgpack.encode([(0, -1, MIB)]),
    "a unit behind the last": msgspec.msgpack.encode([(0, 1 << 40, MIB)]),
    "beyond the end": msgspec.msgpack.encode([(0, 255, MIB)]),
    "nothing": msgspec.msgpack.encode([(0, 0, 0)]),
    "less than nothing": msgspec.msgpack.encode([(0, 0, -1)]),
}


@pytest.mark.parametrize("loans", FORGED.values(), ids=FORGED.keys())
def test_an_invalid_loan_gives_an_empty_frame(ends: Ends, loans: bytes) -> None:
    assert ends[1].restore([b"", loans, b""]) == [b""]


def test_a_fork_of_the_receiver_frees_no_memory(ends: Ends) -> None:
    sender, receiver = ends
    held = [receiver.restore(sender.lend([b"body", LARGE])) for _ in range(ALL_LARGE)]
    child = os.fork()
    if child == 0:
        held.clear()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert sender.lend([b"body", LARGE]) == [b"body", LARGE]


def test_the_memory_is_freed_after_the_last_reference() -> None:
    # What earlier tests have left in cycles.
    gc.collect()
    before = descriptors(), mappings()
    fd = new_shared_memory()
    sender, receiver = SharedMemory(fd, 0), SharedMemory(fd, 1)
    os.close(fd)
    message = receiver.restore(sender.lend([b"body", LARGE]))
    del sender, receiver
    assert bytes(memoryview(message[1])[-1:]) == b"x", "it ended before what was taken from it"
    del message
    assert (descriptors(), mappings()) == before


def test_the_memory_cannot_be_shrunk() -> None:
    fd = new_shared_memory()
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
