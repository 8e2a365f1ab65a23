"""Checks of a pipeline's graph. Each raises PipelineError with the place of the first fault."""

from collections.abc import Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from vllm_omni_plugin.errors import did_you_mean
from vllm_omni_plugin.pipeline.places import PipelineError, Place
from vllm_omni_plugin.pipeline.stage import Modality, Stage


def check_stages(stages: Sequence[Stage]) -> None:
    """Check everything but the transforms, in the order in which one check relies on another."""
    _check_ids(stages)
    _check_names(stages)
    _check_inputs(stages)
    _check_acyclic(stages)
    _check_outputs(stages)
    _check_chunks_and_caches(stages)
    _check_entry(stages)


def _check_ids(stages: Sequence[Stage]) -> None:
    taken: dict[int, str] = {}
    for index, stage in enumerate(stages):
        place = ("stages", index, "id")
        if stage.id in taken:
            raise PipelineError(f"{stage.id} is the id of the stage {taken[stage.id]!r} already", place)
        if not 0 <= stage.id < len(stages):
            raise PipelineError(f"{stage.id} leaves a gap: the ids of {len(stages)} stages count up from 0", place)
        taken[stage.id] = stage.name


def _check_names(stages: Sequence[Stage]) -> None:
    taken: dict[str, int] = {}
    for index, stage in enumerate(stages):
        if stage.name in taken:
            message = f"{stage.name!r} is the name of the stage with id {taken[stage.name]} already"
            raise PipelineError(message, ("stages", index, "name"))
        taken[stage.name] = stage.id


def _check_inputs(stages: Sequence[Stage]) -> None:
    names = [stage.name for stage in stages]
    for index, stage in enumerate(stages):
        for position, name in enumerate(stage.inputs):
            if name not in names:
                message = f"there is no stage {name!r}{did_you_mean(name, names)}: use one of {', '.join(names)}"
                raise PipelineError(message, ("stages", index, "inputs", position))


def _check_acyclic(stages: Sequence[Stage]) -> None:
    try:
        TopologicalSorter({stage.name: stage.inputs for stage in stages}).prepare()
    except CycleError as error:
        names = [stage.name for stage in stages]
        cycle: list[str] = error.args[1][:-1]
        start = min(range(len(cycle)), key=lambda position: names.index(cycle[position]))
        cycle = [*cycle[start:], *cycle[:start], cycle[start]]
        place = ("stages", names.index(cycle[0]), "inputs")
        raise PipelineError(f"a stage would wait for its own output: {' -> '.join(cycle)}", place) from None


def _check_outputs(stages: Sequence[Stage]) -> None:
    if not any(stage.final for stage in stages):
        raise PipelineError("no stage is final: set 'final: true' where output leaves the pipeline", ("stages",))
    inputs = {stage.name: stage.inputs for stage in stages}
    useful = ancestors(inputs, [stage.name for stage in stages if stage.final])
    for index, stage in enumerate(stages):
        if stage.name not in useful:
            message = f"the stage {stage.name!r} reaches no final output: make it final or an input, or leave it out"
            raise PipelineError(message, ("stages", index))


def _check_entry(stages: Sequence[Stage]) -> None:
    if not any(stage.is_vllm and not stage.inputs for stage in stages):
        message = "every stage without inputs is a Python engine, but it takes vLLM's to read the request's prompt"
        raise PipelineError(message, ("stages",))


def _check_chunks_and_caches(stages: Sequence[Stage]) -> None:
    """Check that chunks and KV caches can pass between the stages."""
    by_name = {stage.name: stage for stage in stages}
    for index, stage in enumerate(stages):
        place: Place = ("stages", index)
        upstream = [by_name[name] for name in stage.inputs]
        if stage.output is Modality.KV_CACHE:
            _check_prefill(stage, place)
        for source in upstream:
            if source.output is Modality.KV_CACHE:
                _check_decode(stage, source, place)
        if stage.async_chunk:
            _check_chunks(stage, place)


def _check_prefill(stage: Stage, place: Place) -> None:
    if not stage.is_vllm:
        raise PipelineError("only vLLM's engine puts out a KV cache", (*place, "output"))
    if stage.final:
        raise PipelineError("a KV cache leaves no pipeline: a stage must take it", (*place, "final"))
    if stage.inputs:
        raise PipelineError("the KV cache is that of the request's own prompt: leave out 'inputs'", (*place, "inputs"))
    if stage.sampling:
        raise PipelineError("a stage that only fills a KV cache samples nothing", (*place, "sampling"))


def _check_decode(stage: Stage, source: Stage, place: Place) -> None:
    if len(stage.inputs) > 1:
        raise PipelineError(f"the KV cache of {source.name!r} must be the only input", (*place, "inputs"))
    if stage.async_chunk:
        raise PipelineError("a KV cache is handed over whole, not in chunks", (*place, "async_chunk"))
    if not stage.is_vllm:
        raise PipelineError(f"only vLLM's engine takes the KV cache of {source.name!r}", (*place, "engine"))
    if stage.model != source.model:
        message = f"the KV cache of {source.name!r} belongs to its model, {source.model!r}"
        raise PipelineError(message, (*place, "model"))


def _check_chunks(stage: Stage, place: Place) -> None:
    if not stage.inputs:
        raise PipelineError("no stage's chunks reach a stage without inputs", (*place, "async_chunk"))
    if len(stage.inputs) > 1:
        message = f"chunks come from one stage, and this one has {len(stage.inputs)} inputs"
        raise PipelineError(message, (*place, "async_chunk"))
    if stage.is_vllm and "max_tokens" not in stage.sampling:
        # Its first answer could otherwise fill the model's whole context, and leave no room for the next chunk.
        message = "set 'max_tokens', which bounds the answer to each chunk"
        raise PipelineError(message, (*place, "sampling" if stage.sampling else "async_chunk"))


def ancestors(inputs: Mapping[str, Iterable[str]], ends: Iterable[str]) -> set[str]:
    """Return the names in `ends` and all from which a path leads to one of them.

    Args:
        inputs: for every name, those with an edge to it.
        ends: where the paths end.
    """
    reached: set[str] = set()
    pending = list(ends)
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += inputs[name]
    return reached
