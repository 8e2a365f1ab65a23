"""Checks of a pipeline's graph. Each check raises PipelineError at the first fault."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter

from vllm_omni_plugin.errors import did_you_mean
from vllm_omni_plugin.pipeline.stage import Modality, PipelineError, Stage


def check_stages(stages: Sequence[Stage]) -> None:
    """Run all checks but those of transforms. Later checks rely on earlier ones."""
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
    """Some stage must be final, and each stage must lead to a final one."""
    if not any(stage.final for stage in stages):
        raise PipelineError("no stage is final: set 'final: true' where output leaves the pipeline", ("stages",))
    inputs = {stage.name: stage.inputs for stage in stages}
    useful = ancestors(inputs, [stage.name for stage in stages if stage.final])
    for index, stage in enumerate(stages):
        if stage.name not in useful:
            message = f"the stage {stage.name!r} reaches no final output: make it final or an input, or leave it out"
            raise PipelineError(message, ("stages", index))


def _check_entry(stages: Sequence[Stage]) -> None:
    """A vLLM stage must read the prompt."""
    if not any(stage.is_vllm and not stage.inputs for stage in stages):
        message = "no stage without inputs is a vLLM stage, which is needed to read the prompt"
        raise PipelineError(message, ("stages",))


def _check_chunks_and_caches(stages: Sequence[Stage]) -> None:
    by_name = {stage.name: stage for stage in stages}
    for index, stage in enumerate(stages):
        for is_wrong, key, message in _rules(stage, [by_name[name] for name in stage.inputs]):
            if is_wrong:
                raise PipelineError(message, ("stages", index, key))


def _rules(stage: Stage, upstream: Iterable[Stage]) -> Iterator[tuple[bool, str, str]]:
    """All rules for a stage: whether it breaks the rule, the key at fault, and the message."""
    if stage.output is Modality.KV_CACHE:
        yield not stage.is_vllm, "output", "only vLLM's engine can output a KV cache"
        yield stage.final, "final", "a KV cache cannot be final: another stage must take it"
        yield bool(stage.inputs), "inputs", "the KV cache is that of the request's own prompt: leave out 'inputs'"
        yield bool(stage.sampling), "sampling", "a stage that only fills a KV cache samples nothing"
    for source in upstream:
        if source.output is Modality.KV_CACHE:
            cache = f"the KV cache of {source.name!r}"
            yield len(stage.inputs) > 1, "inputs", f"{cache} must be the only input"
            yield stage.async_chunk, "async_chunk", "a KV cache is handed over whole, not in chunks"
            yield not stage.is_vllm, "engine", f"only vLLM's engine takes {cache}"
            yield stage.model != source.model, "model", f"{cache} belongs to its model, {source.model!r}"
    if stage.async_chunk:
        count = len(stage.inputs)
        yield not count, "async_chunk", "no stage's chunks reach a stage without inputs"
        yield count > 1, "async_chunk", f"chunks come from one stage, and this one has {count} inputs"
        # Otherwise the first answer could fill the model's context and leave no room for the next chunk.
        unbounded = stage.is_vllm and "max_tokens" not in stage.sampling
        key = "sampling" if stage.sampling else "async_chunk"
        yield unbounded, key, "set 'max_tokens', which bounds the answer to each chunk"


def ancestors(inputs: Mapping[str, Iterable[str]], ends: Iterable[str]) -> set[str]:
    """Return the names in `ends` and all their direct and indirect inputs."""
    reached: set[str] = set()
    pending = list(ends)
    while pending:
        name = pending.pop()
        if name not in reached:
            reached.add(name)
            pending += inputs[name]
    return reached
