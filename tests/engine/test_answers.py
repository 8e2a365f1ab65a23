"""The comparison of answers sees what it must see."""

import json
from typing import Any

import pytest

from .answers import comparable, differences, join_events


def stream(*events: dict[str, Any]) -> str:
    return "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"


def delta(content: str, finish_reason: str | None = None, index: int = 0) -> dict[str, Any]:
    choice = {"index": index, "delta": {"content": content}, "finish_reason": finish_reason}
    return {"id": "1", "object": "chunk", "choices": [choice]}


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"text": "a"}, {"text": "b"}),
        ({"text": "a"}, {}),
        ([1, 2], [1]),
        ({"n": 1}, {"n": True}),
        ({"logprob": -1.0}, {"logprob": -1.001}),
        ({"choices": [{"text": "a"}]}, {"choices": [{"text": None}]}),
    ],
)
def test_a_difference_is_seen(left: Any, right: Any) -> None:
    assert len(differences(left, right)) == 1


def test_rounding_and_names_are_no_difference() -> None:
    assert differences({"logprob": -1.0}, {"logprob": -1.00001}) == []
    assert differences(comparable({"id": "a", "x": [{"created": 1}]}), comparable({"id": "b", "x": [{}]})) == []


def test_chunks_may_be_cut_and_mixed_in_any_way() -> None:
    one = stream(delta("ab"), delta("cd", index=1), delta("c", "stop"))
    other = stream(delta("c", index=1), delta("a"), delta("bc", "stop"), delta("d", index=1))
    assert differences(join_events(one), join_events(other)) == []


@pytest.mark.parametrize(
    "other",
    [
        stream(delta("a"), delta("c", "stop")),
        stream(delta("ab", "length")),
        stream(delta("ab", "stop")) + "data: [DONE]\n\n",
        stream(delta("ab", "stop"), {"error": {"message": "lost"}}),
    ],
)
def test_another_stream_is_seen(other: str) -> None:
    assert differences(join_events(stream(delta("a"), delta("b", "stop"))), join_events(other)) != []
