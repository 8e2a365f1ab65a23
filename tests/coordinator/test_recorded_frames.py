"""Frames of versions before this one, recorded by `python -m tools.wire_frames`, are read with all that they say."""

import json
from typing import Any

import msgspec
import pytest

from tools.wire_frames import FOLDER, READERS, lines_of

RECORDED = [
    pytest.param(*line.split(": ", 1), id=f"{file.stem}-{number}")
    for file in sorted(FOLDER.glob("*.txt"))
    for number, line in enumerate(file.read_text().splitlines())
]


def is_in(said: Any, read: Any) -> bool:
    """Whether what was read has all that was said; it may have more keys."""
    if isinstance(said, dict):
        return isinstance(read, dict) and all(key in read and is_in(value, read[key]) for key, value in said.items())
    if isinstance(said, list):
        return isinstance(read, list) and len(said) <= len(read) and all(map(is_in, said, read))
    return bool(said == read)


@pytest.mark.parametrize(("direction", "frame"), RECORDED)
def test_a_frame_of_a_version_before_is_read_with_all_that_it_says(direction: str, frame: str) -> None:
    reader, _ = READERS[direction]
    assert is_in(json.loads(frame), msgspec.json.decode(msgspec.json.encode(reader(frame.encode()))))


def test_this_version_can_be_recorded_for_later_ones() -> None:
    for line in lines_of():
        direction, frame = line.split(": ", 1)
        assert READERS[direction][0](frame.encode())
