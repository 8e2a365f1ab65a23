"""Frames of versions before this one, recorded by `python -m tools.wire_frames`, are read with all that they say."""

import json
from typing import Any

import msgspec
import pytest

from tools.wire_frames import FOLDER, READERS, lines_of
from vllm_omni_plugin.coordinator import generation_of

RECORDED = [
    pytest.param(*line.split(": ", 1), id=f"{file.stem}-{number}")
    for file in sorted(FOLDER.glob("*.txt"))
    for number, line in enumerate(file.read_text().splitlines())
]
GENERATION = FOLDER / "generation-of-0.2.txt"
"""What a node is told of two stages, one of them in Python, and the `Hello` of a head that has them."""


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


@pytest.mark.parametrize("later", [{}, {"a field that later versions compare": "x"}])
def test_heads_of_other_versions_of_this_plugin_are_of_the_same_generation(later: dict[str, str]) -> None:
    *stages, hello = (line.split(": ", 1) for line in GENERATION.read_text().splitlines())
    fingerprints = [READERS[direction][0](frame.encode())[0].fingerprint for direction, frame in stages]
    (head,) = [READERS[hello[0]][0](hello[1].encode())]
    assert generation_of({stage: fields | later for stage, fields in enumerate(fingerprints)}) == head.generation
    assert len({generation_of({0: fingerprints[0] | {name: "other"}}) for name in fingerprints[0]}) == 18


def test_this_version_can_be_recorded_for_later_ones() -> None:
    for line in lines_of():
        direction, frame = line.split(": ", 1)
        assert READERS[direction][0](frame.encode())
