"""What stages must be for chunks and KV caches to pass between them."""

from collections.abc import Sequence

from vllm_omni_plugin.pipeline.places import PipelineError, Place
from vllm_omni_plugin.pipeline.stage import Modality, Stage


def check_hand_over(stages: Sequence[Stage]) -> None:
    """Check each stage with the stages whose outputs it gets; their names are known to be right.

    Raises:
        PipelineError: with the place of the first fault.
    """
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
