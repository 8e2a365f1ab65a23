"""How the output of one stage is cut into the chunks of the next one's input."""

from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_plugin.orchestrator.multi_stage.chunked_input import ChunkedInput, OutputChunk
from vllm_omni_plugin.pipeline import StageOutput
from vllm_omni_plugin.pipeline.output_reader import joined


class Rows(NamedTuple):
    """What is read of a tensor."""

    rows: int
    ndim: int = 1

    def __len__(self) -> int:
        return self.rows


def tokens(*token_ids: int) -> StageOutput:
    return StageOutput(token_ids)


def chunks_of(size: int, *outputs: StageOutput, end: bool = True) -> list[OutputChunk]:
    """The chunks of these outputs, the last of which ends the upstream stage."""
    chunked = ChunkedInput(size)
    for position, output in enumerate(outputs, start=1):
        chunked.add(output, last=end and position == len(outputs))
    return list(chunked.chunks)


def sizes(cut: list[OutputChunk]) -> list[int]:
    return [len(chunk.outputs) for chunk in cut]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        pytest.param(StageOutput(tensor=Rows(2)), [1, 1, 1], id="rows of a tensor"),
        pytest.param(StageOutput(tensor=Rows(1)), [2, 1], id="one row each"),
        pytest.param(StageOutput(tensor=Rows(0, ndim=0)), [2, 1], id="a tensor of one number"),
        pytest.param(StageOutput((7,), tensor=Rows(99)), [2, 1], id="tokens count before rows"),
        pytest.param(StageOutput(text="a sentence"), [1, 1, 1], id="text alone"),
        pytest.param(StageOutput(), [3], id="nothing"),
    ],
)
def test_what_counts_as_the_size_of_an_output(output: Any, expected: list[int]) -> None:
    assert sizes(chunks_of(2, output, output, output)) == expected


@given(size=st.integers(1, 5), lengths=st.lists(st.integers(0, 7), min_size=1, max_size=30))
def test_chunks_are_the_output_in_order_as_small_as_allowed_and_only_the_last_is_short(
    size: int, lengths: list[int]
) -> None:
    numbers = iter(range(1000))
    outputs = [tokens(*(next(numbers) for _ in range(length))) for length in lengths]
    cut = chunks_of(size, *outputs)
    assert [output for chunk in cut for output in chunk.outputs] == outputs
    assert [chunk.number for chunk in cut] == list(range(len(cut)))
    assert [chunk.last for chunk in cut] == [False] * (len(cut) - 1) + [True]
    assert all(len(joined(chunk.outputs).token_ids) >= size for chunk in cut[:-1])
    assert all(sum(len(output.token_ids) for output in chunk.outputs[:-1]) < size for chunk in cut)
