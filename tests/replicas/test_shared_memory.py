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
    """What goes through the socket of a message."""
    return sum(memoryview(frame).nbytes for frame in frames)


@pytest.mark.parametrize("swapped", [False, True])
def test_a_message_arrives_as_it_was_and_large_frames_are_not_in_it(ends: Ends, swapped: bool) -> None:
    sender, receiver = reversed(ends) if swapped else ends
    message = [b"\x00", b"body", b"a" * MIB, b"b" * 1000, bytearray(b"c" * (3 * MIB + 5))]
    sent = sender.lend(message)
    assert sent_bytes(sent) < 1100
    assert [bytes(frame) for frame in receiver.take(sent)] == [bytes(frame) for frame in message]


@pytest.mark.parametrize("message", [[b"body"], [b"\x00", b""], [b"a", b"b" * 100_000], [b"", b""], [b""]])
def test_small_frames_travel_as_they_are(ends: Ends, message: list[bytes]) -> None:
    assert ends[0].lend(message) == message


@pytest.mark.parametrize("message", [[b"body"], [b"\x00", b""], [b"a", b"b" * 100_000]])
def test_a_message_without_loans_arrives_as_it_came(ends: Ends, message: list[bytes]) -> None:
    assert ends[1].take(message) == message


def test_what_is_too_large_travels_as_it_is(ends: Ends) -> None:
    message = [b"body", LARGE + b"x"]
    assert ends[0].lend(message) == message


def test_without_room_frames_travel_as_they_are_until_some_is_given_back(ends: Ends) -> None:
    sender, receiver = ends
    held = [receiver.take(sender.lend([b"body", LARGE])) for _ in range(ALL_LARGE)]
    full = sender.lend([b"body", LARGE])
    assert full == [b"body", LARGE]
    view = memoryview(held.pop()[1])
    assert sender.lend([b"body", LARGE]) == full, "a view still refers to it"
    del view
    assert sent_bytes(sender.lend([b"body", LARGE])) < 100


def test_what_is_held_never_changes_and_what_fits_is_lent(ends: Ends) -> None:
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
        held.append((receiver.take(sent)[1], mark, size))
        while len(held) > 10 or (held and rng.random() < 0.4):
            data, mark, size = held.pop(rng.randrange(len(held)))
            view = memoryview(data)
            assert (bytes(view[:4]), bytes(view[-4:]), view.nbytes) == (mark, mark, size)
            del data, view
    assert 75 < lent < 150


FORGED = {
    "no list": b"\xc1",
    "empty": b"",
    "another type": msgspec.msgpack.encode({"a": 1}),
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
def test_a_loan_that_is_none_is_an_empty_frame(ends: Ends, loans: bytes) -> None:
    assert ends[1].take([b"", loans, b""]) == [b""]


def test_a_fork_of_the_receiver_gives_nothing_back(ends: Ends) -> None:
    sender, receiver = ends
    held = [receiver.take(sender.lend([b"body", LARGE])) for _ in range(ALL_LARGE)]
    child = os.fork()
    if child == 0:
        held.clear()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert sender.lend([b"body", LARGE]) == [b"body", LARGE]


def test_nothing_is_left_when_nobody_refers_to_it() -> None:
    # What earlier tests have left in cycles.
    gc.collect()
    before = descriptors(), mappings()
    fd = new_shared_memory()
    sender, receiver = SharedMemory(fd, 0), SharedMemory(fd, 1)
    os.close(fd)
    message = receiver.take(sender.lend([b"body", LARGE]))
    del sender, receiver
    assert bytes(memoryview(message[1])[-1:]) == b"x", "it ended before what was taken from it"
    del message
    assert (descriptors(), mappings()) == before


def test_neither_end_can_take_memory_away_from_the_other() -> None:
    fd = new_shared_memory()
    try:
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    finally:
        os.close(fd)
