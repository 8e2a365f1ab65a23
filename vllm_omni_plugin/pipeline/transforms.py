"""Transforms: the built-in ones and what they fit, those of users found by name, and a check of what they return."""

import inspect
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import reduce
from importlib import import_module
from types import MappingProxyType
from typing import Any

from vllm_omni_plugin.documents import Place
from vllm_omni_plugin.errors import ConfigError, StageError
from vllm_omni_plugin.pipeline.stage import Modality, PipelineError, Stage
from vllm_omni_plugin.pipeline.transfer import StageInput, StageOutput, Transfer, Transform


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


def tokens(outputs: Mapping[str, StageOutput], transfer: Transfer) -> Sequence[int] | None:
    """The tokens of the one stage as they are; None if there are none."""
    (output,) = outputs.values()
    return output.token_ids or None


def text(outputs: Mapping[str, StageOutput], transfer: Transfer) -> str | None:
    """The text of the one stage; None if there is none."""
    (output,) = outputs.values()
    return output.text or None


def prompt_embeds(outputs: Mapping[str, StageOutput], transfer: Transfer) -> Any:
    """The vectors of the one stage, `[rows, width]`, in place of a prompt's embeddings; a single vector is one row."""
    (output,) = outputs.values()
    tensor = output.tensor
    return tensor[None] if tensor is not None and tensor.ndim == 1 else tensor


_BUILT_IN: Mapping[str, Transform] = MappingProxyType(
    {
        BuiltInTransform.TOKENS: tokens,
        BuiltInTransform.TEXT: text,
        BuiltInTransform.PROMPT_EMBEDS: prompt_embeds,
    }
)


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


def resolve_transform(name: str) -> Transform | None:
    """Return the transform of this name; None for `kv_transfer`, where engines exchange the data themselves.

    Args:
        name: a `BuiltInTransform`, or `package.module:function`, which is imported.

    Raises:
        ConfigError: there is no such function, or it cannot be called with outputs and a `Transfer`.
    """
    if name in list(BuiltInTransform):
        return _BUILT_IN.get(name)
    function = _imported(name)
    if not callable(function):
        raise ConfigError(f"the transform {name!r} is no function, but {_type_of(function)}")
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"the transform {name!r} is asynchronous: write it as a plain function, which may block")
    try:
        inspect.signature(function).bind({}, None)
    except (TypeError, ValueError) as error:
        message = f"the transform {name!r} must take two arguments, the outputs and a Transfer: {error}"
        raise ConfigError(message) from None
    transform: Transform = function
    return transform


def _imported(name: str) -> Any:
    module_name, _, path = name.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # the module runs whatever its author wrote
        message = f"the transform {name!r} cannot be imported: {type(error).__name__}: {error}"
        raise ConfigError(message) from error
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError:
        raise ConfigError(f"the transform {name!r} does not exist: {module_name} has no {path}") from None


def check_input(returned: Any, stage: str) -> StageInput | None:
    """Return what a transform returned as a `StageInput`; None if it returned None.

    Raises:
        StageError: it is nothing that can be an input, or holds nothing to compute on.
    """
    if returned is None:
        return None
    given = returned if isinstance(returned, StageInput) else _from_shorthand(returned)
    fault = f"returned {_type_of(returned)}" if given is None else _fault(given)
    if given is None or fault:
        raise StageError(f"Stage {stage!r}: its transform {fault}.")
    return given


def _from_shorthand(returned: Any) -> StageInput | None:
    """The input that a shorthand stands for; None if it is no shorthand."""
    if isinstance(returned, str):
        return StageInput(text=returned)
    if _is_tensor(returned):
        return StageInput(tensor=returned)
    if isinstance(returned, Sequence):
        return StageInput(token_ids=returned)
    return None


def _fault(given: Any) -> str:
    """What is wrong with an input, "" if nothing is."""
    if given.text is not None and not isinstance(given.text, str):
        return f"returned {_type_of(given.text)} as text"
    if given.token_ids is not None and not _are_tokens(given.token_ids):
        return "returned token ids that are no sequence of whole numbers from 0 on"
    if given.tensor is not None and not _is_tensor(given.tensor):
        return f"returned {_type_of(given.tensor)} as a tensor"
    for name in ("metadata", "sampling"):
        if not isinstance(getattr(given, name), Mapping):
            return f"returned {_type_of(getattr(given, name))} as {name}"
    has_rows = given.tensor is not None and given.tensor.numel() > 0
    return "" if given.text or given.token_ids or has_rows or given.metadata else "returned nothing to compute on"


def _are_tokens(value: Any) -> bool:
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray, memoryview)):
        return False
    return set(map(type, value)) <= {int} and min(value, default=0) >= 0


def _is_tensor(value: Any) -> bool:
    # Importing torch to ask would take seconds, and some of the processes that read pipelines have no use for it.
    return callable(getattr(value, "numel", None)) and hasattr(value, "dtype")


def _type_of(value: Any) -> str:
    return f"a value of type {type(value).__name__}"
