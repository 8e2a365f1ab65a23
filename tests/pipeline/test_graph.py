"""The graph of stages: order, reach, and which stages a request needs."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_omni_plugin.pipeline import Modality, Pipeline, PipelineError, Stage, load_pipeline

from .files import SPEECH


def stage(id_: int, *inputs: int, **more: Any) -> Stage:
    """A stage whose transform fits whatever it gets."""
    given: dict[str, Any] = {
        "engine": "vllm",
        "model": "m",
        "output": Modality.TEXT,
        "transform": "a.b:c",
        "final": True,
    }
    return Stage(id=id_, name=f"s{id_}", inputs=tuple(f"s{up}" for up in inputs), **given | more)


def ids(stages: tuple[Stage, ...]) -> list[int]:
    return [stage.id for stage in stages]


@st.composite
def edges(draw: st.DrawFn) -> list[set[int]]:
    """The inputs of each stage of a graph without cycles, whose ids are in no order."""
    count = draw(st.integers(1, 8))
    order = draw(st.permutations(range(count)))
    inputs: list[set[int]] = [set() for _ in range(count)]
    for position, id_ in enumerate(order):
        inputs[id_] = set(draw(st.lists(st.sampled_from(order[:position])))) if position else set()
    return inputs


def build(inputs: list[set[int]], seed: int, **more: Any) -> Pipeline:
    stages = [stage(id_, *sorted(ups), **more) for id_, ups in enumerate(inputs)]
    Random(seed).shuffle(stages)
    return Pipeline(tuple(stages))


@given(edges(), st.integers())
def test_every_stage_is_in_the_order_once_and_behind_its_inputs(inputs: list[set[int]], seed: int) -> None:
    pipeline = build(inputs, seed)
    order = ids(pipeline.order)
    assert sorted(order) == list(range(len(inputs))) == ids(pipeline.stages)
    assert all(order.index(up) < order.index(id_) for id_, ups in enumerate(inputs) for up in ups)
    assert order == ids(build(inputs, seed + 1).order)


@given(edges(), st.data())
def test_a_cycle_is_refused_and_named(inputs: list[set[int]], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(inputs) - 1))
    # Go downstream at random; the edge from wherever that ends back to the start closes a cycle.
    end = start
    while downstream := [id_ for id_, ups in enumerate(inputs) if end in ups]:
        end = data.draw(st.sampled_from([*downstream]))
        if data.draw(st.booleans()):
            break
    inputs[start].add(end)
    with pytest.raises(PipelineError) as raised:
        build(inputs, seed=0)
    way = [int(name.removeprefix("s")) for name in raised.value.message.rpartition(": ")[2].split(" -> ")]
    assert way[0] == way[-1]
    assert len(set(way)) == len(way) - 1
    assert all(before in inputs[after] for before, after in pairwise(way))


@given(edges(), st.data())
def test_a_request_needs_exactly_the_inputs_of_its_modalities(inputs: list[set[int]], data: st.DataObject) -> None:
    sinks = set(range(len(inputs))) - set().union(*inputs)
    finals = sinks | data.draw(st.sets(st.sampled_from(range(len(inputs)))))
    audio = data.draw(st.sets(st.sampled_from(sorted(finals))))
    stages = [
        stage(id_, *ups, final=id_ in finals, output=Modality.AUDIO if id_ in audio else Modality.TEXT)
        for id_, ups in enumerate(inputs)
    ]
    pipeline = Pipeline(tuple(stages))
    if not audio:
        return
    needed = ids(pipeline.needed_for(["audio"]))
    leads: set[int] = set(audio)
    for id_ in reversed(ids(pipeline.order)):
        if id_ in leads:
            leads |= inputs[id_]
    assert needed == [id_ for id_ in ids(pipeline.order) if id_ in leads]


@pytest.mark.parametrize(
    ("modalities", "message"),
    [
        (["image"], "'image' asked for, but the outputs of this pipeline are text, audio"),
        (["text", "video", "tokens"], "'video', 'tokens' asked for, but the outputs of this pipeline are text, audio"),
        ([], "nothing asked for, but the outputs of this pipeline are text, audio"),
    ],
)
def test_asking_for_what_no_final_stage_puts_out_is_an_error(modalities: list[str], message: str) -> None:
    with pytest.raises(ValueError, match="asked for") as raised:
        load_pipeline(SPEECH).needed_for(modalities)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("output", "expected"),
    [("text", "text"), ("tokens", "tokens"), ("embedding", "prompt_embeds"), ("latent", "prompt_embeds")],
)
def test_a_stage_without_a_transform_gets_the_one_that_fits(output: str, expected: str) -> None:
    pipeline = Pipeline((stage(0, output=Modality(output)), stage(1, 0, transform=None)))
    assert pipeline.transform_of(pipeline.stages[1]) == expected


@pytest.mark.parametrize("output", ["audio", "image", "scores"])
def test_no_built_in_transform_takes_audio_images_or_scores(output: str) -> None:
    with pytest.raises(PipelineError, match=rf"^stages\[1\]: no built-in transform takes {output} of the stage 's0'"):
        Pipeline((stage(0, output=Modality(output)), stage(1, 0, transform=None)))


def test_the_request_itself_needs_no_transform_but_may_have_one() -> None:
    pipeline = Pipeline((stage(0, transform=None), stage(1)))
    assert [pipeline.transform_of(each) for each in pipeline.stages] == [None, "a.b:c"]


def test_an_error_says_where_among_the_stages_as_they_were_given() -> None:
    with pytest.raises(PipelineError) as raised:
        Pipeline((stage(1), stage(0, 1, 7)))
    assert raised.value.place == ("stages", 1, "inputs", 1)
    assert str(raised.value) == "stages[1].inputs[1]: there is no stage 's7': use one of s1, s0"
    with pytest.raises(PipelineError, match="no stage is final"):
        Pipeline(())
