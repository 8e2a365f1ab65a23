"""Which transform turns the outputs of stages into the input of the next."""

from collections.abc import Sequence
from enum import StrEnum

from vllm_omni_plugin.pipeline.places import PipelineError, Place
from vllm_omni_plugin.pipeline.stage import Modality, Stage


class BuiltInTransform(StrEnum):
    """Transforms that come with the plugin; each takes the output of one stage."""

    TOKENS = "tokens"
    """The tokens as they are, for a model that reads them."""
    TEXT = "text"
    """The text, tokenised anew by the next model."""
    PROMPT_EMBEDS = "prompt_embeds"
    """The vectors in place of a prompt's embeddings."""
    KV_TRANSFER = "kv_transfer"
    """The KV cache of the request's prompt, which engines hand over by a KV connector."""


_FITTING = {
    Modality.TEXT: (BuiltInTransform.TEXT, BuiltInTransform.TOKENS),
    Modality.TOKENS: (BuiltInTransform.TOKENS,),
    Modality.EMBEDDING: (BuiltInTransform.PROMPT_EMBEDS,),
    Modality.LATENT: (BuiltInTransform.PROMPT_EMBEDS,),
    Modality.KV_CACHE: (BuiltInTransform.KV_TRANSFER,),
}
"""What can take an output; the first is the default."""


def fitting_transform(stage: Stage, upstream: Sequence[Stage], place: Place) -> str | None:
    """Return the transform in front of a stage; None: it gets the request as it is.

    Raises:
        PipelineError: the stage names none and none fits, or it names one that does not.
    """
    named = stage.transform
    gets_cache = any(up.output is Modality.KV_CACHE for up in upstream)
    if named is not None and named not in list(BuiltInTransform) and not gets_cache:
        return named
    if not upstream:
        if named is None:
            return None
        raise PipelineError(f"{named!r} needs the output of a stage, and this one has no inputs", (*place, "transform"))
    fitting = _FITTING.get(upstream[0].output, ()) if len(upstream) == 1 else ()
    if named is None and fitting:
        return fitting[0]
    if named in fitting:
        return named
    raise PipelineError(_misfit(named, upstream, fitting), (*place, "transform") if named else place)


def _misfit(named: str | None, upstream: Sequence[Stage], fitting: Sequence[str]) -> str:
    if len(upstream) > 1:
        what = f"the outputs of {len(upstream)} stages"
    else:
        what = f"{upstream[0].output} of the stage {upstream[0].name!r}"
    ways = [f"'{transform}'" for transform in fitting]
    if BuiltInTransform.KV_TRANSFER not in fitting:
        ways.append("package.module:function")
    who = f"{named!r} does not take" if named else "no built-in transform takes"
    return f"{who} {what}: set 'transform' to {' or '.join(ways)}"
