"""Stages that begin on chunks of their input: how it is cut, what they get, in which order, and when they end."""

import threading
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import REFUSED
from tests.fakes.pipeline_fleet import FakePipelineFleet, stage
from tests.fakes.pipelines import PYTHON, SPEECH
from vllm_omni_plugin.orchestrator.multi_stage.chunked_input import ChunkedInput, OutputChunk
from vllm_omni_plugin.pipeline import StageOutput
from vllm_omni_plugin.pipeline.output_reader import joined

CHUNKED_FRONT = (
    stage(0, "thinker", "text"),
    stage(1, "refiner", "text", "thinker", async_chunk=True, chunk_size=2, final=True),
)
LISTENING = (
    stage(0, "thinker", "text", final=True),
    stage(1, "speaker", "audio", "thinker", engine=PYTHON, async_chunk=True, chunk_size=2, final=True),
)


def chunks(fleet: FakePipelineFleet, stage_id: int) -> list[list[int]]:
    """Chunks with content that the only request's session of a stage has got."""
    link = fleet.links[stage_id, 0]
    return [body["prompt"] for body in link.requests if body["resumable"]]


def has_ended(fleet: FakePipelineFleet, stage_id: int) -> bool:
    """Whether a stage has done its work for the only request."""
    return fleet.states["r"].runs[stage_id].finished


async def test_chunks_keep_their_order_though_the_transform_is_slow(gate: threading.Event) -> None:
    seen: list[int] = []

    def transform(transfer: Any) -> None:
        seen.append(transfer.chunk)
        if transfer.chunk == 0:
            gate.wait(30)

    async with FakePipelineFleet(SPEECH) as fleet:
        await fleet.submit("r", "text", "audio", prompt=[3], params={"talker": transform})
        link, attempt = fleet.attempt("r", 0)
        for _ in range(4):
            link.step(attempt)
        await fleet.read()
        assert fleet.ends == [("r", "stop")]
        gate.set()
        await fleet.settle()
        assert seen == [0, 1]
        assert chunks(fleet, 1) == [[4, 7], [10, 13]]


async def test_a_session_that_a_paused_replica_refuses_is_sent_to_another_one_with_all_its_chunks() -> None:
    async with FakePipelineFleet(SPEECH, replicas=[1, 2, 1]) as fleet:
        await fleet.submit("r", "text", "audio", prompt=[3])
        await fleet.step("r", 0, count=2)
        await fleet.step("r", 0, count=1)
        run = fleet.states["r"].runs[1]
        first = run.replica_id
        fleet.tell("r", 1, finish_reason=REFUSED)
        await eventually(lambda: run.replica_id not in (first, None), "another attempt")
        link, attempt = fleet.attempt("r", 1)
        await fleet.finish()
        assert link.chunks(attempt) == [[4, 7], [10, 13]]
        assert fleet.call_ends("r") == [None]


async def test_a_last_chunk_that_gives_nothing_still_closes_the_input() -> None:
    def transform(transfer: Any) -> Any:
        return "nothing" if transfer.last else None

    async with FakePipelineFleet(SPEECH) as fleet:
        await fleet.submit("r", "text", "audio", prompt=[3], params={"talker": transform})
        for _ in range(3):
            await fleet.step("r", 0)
        await fleet.step("r", 1, count=9)
        assert not has_ended(fleet, 1)
        await fleet.step("r", 0)
        assert chunks(fleet, 1) == [[4, 7]]
        assert has_ended(fleet, 1)
        await fleet.finish()
        assert fleet.call_ends("r") == [None]


async def test_a_python_stage_gets_the_end_even_if_the_last_chunk_gives_nothing() -> None:
    async with FakePipelineFleet(LISTENING) as fleet:
        transform = {"speaker": lambda transfer: "nothing" if transfer.last else None}
        await fleet.submit("r", "audio", prompt=[3], params=transform)
        await fleet.finish()
        assert chunks(fleet, 1)[-1] == []
        assert fleet.call_ends("r") == [None]


async def test_the_memory_of_a_transform_is_one_requests_own() -> None:
    counts: dict[str, list[int]] = {"a": [], "b": []}

    def transform(transfer: Any) -> None:
        transfer.memory["seen"] = transfer.memory.get("seen", 0) + 1
        counts[transfer.request_id].append(transfer.memory["seen"])

    async with FakePipelineFleet(SPEECH) as fleet:
        for name in counts:
            await fleet.submit(name, "audio", prompt=[3], params={"talker": transform})
        await fleet.finish()
        assert counts["a"] == counts["b"] == list(range(1, len(counts["a"]) + 1))


async def test_each_chunk_is_built_with_the_size_of_its_session() -> None:
    async with FakePipelineFleet(SPEECH) as fleet:
        await fleet.submit("r", "audio", prompt=[3])
        await fleet.finish()
        sizes = [len(chunk) + 4 for chunk in chunks(fleet, 1)]
        assert fleet.apis[1].held == [sum(sizes[:number]) for number in range(len(sizes))] != []


async def test_an_answering_stage_whose_input_closes_after_its_last_turn_ends_the_answer() -> None:
    transform = {"refiner": lambda transfer: "nothing" if transfer.last else None}
    async with FakePipelineFleet(CHUNKED_FRONT) as fleet:
        await fleet.submit("r", "text", prompt=[3], params=transform)
        for _ in range(3):
            await fleet.step("r", 0)
        await fleet.step("r", 1, count=9)
        assert fleet.ends == []
        await fleet.step("r", 0)
        assert fleet.ends == [("r", "stop")]
        assert fleet.call_ends("r") == [None]


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
