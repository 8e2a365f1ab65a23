"""Built-in transforms and the outputs that they take, lookup of users' transforms, and checks of their results."""

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
    """Transforms of the plugin; each takes the output of one stage."""

    TOKENS = "tokens"
    """The tokens as they are, for a model with the same vocabulary."""
    TEXT = "text"
    """The text, which the next stage tokenises."""
    PROMPT_EMBEDS = "prompt_embeds"
    """Vectors as prompt embeddings."""
    KV_TRANSFER = "kv_transfer"
    """The KV cache of the prompt, which engines transfer by a KV connector."""


def tokens(outputs: Mapping[str, StageOutput], transfer: Transfer) -> Sequence[int] | None:
    (output,) = outputs.values()
    return output.token_ids or None


def text(outputs: Mapping[str, StageOutput], transfer: Transfer) -> str | None:
    (output,) = outputs.values()
    return output.text or None


def prompt_embeds(outputs: Mapping[str, StageOutput], transfer: Transfer) -> Any:
    """The vectors, `[rows, width]`; a single vector becomes one row."""
    (output,) = outputs.values()
    tensor = output.tensor
    return tensor[None] if tensor is not None and tensor.ndim == 1 else tensor


_BUILT_IN: Mapping[str, Transform] = MappingProxyType(
    {BuiltInTransform.TOKENS: tokens, BuiltInTransform.TEXT: text, BuiltInTransform.PROMPT_EMBEDS: prompt_embeds}
)


_FITTING = {
    Modality.TEXT: (BuiltInTransform.TEXT, BuiltInTransform.TOKENS),
    Modality.TOKENS: (BuiltInTransform.TOKENS,),
    Modality.EMBEDDING: (BuiltInTransform.PROMPT_EMBEDS,),
    Modality.LATENT: (BuiltInTransform.PROMPT_EMBEDS,),
    Modality.KV_CACHE: (BuiltInTransform.KV_TRANSFER,),
}
"""Transforms that take an output; the first is the default."""


def fitting_transform(stage: Stage, upstream: Sequence[Stage], place: Place) -> str | None:
    """Return the transform of a stage's input, None for the request as it is; PipelineError if none takes the input."""
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
    """Import a transform; None for `kv_transfer`, which engines do. ConfigError: there is no such function."""
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
    """Import a transform; any error in the user's module is one of the configuration."""
    module_name, _, path = name.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # a user's module may raise anything
        raise ConfigError(
            f"the transform {name!r} cannot be imported: {type(error).__name__}: {error}: correct the name, or add its "
            "folder to PYTHONPATH"
        ) from error
    try:
        return reduce(getattr, path.split("."), module)
    except AttributeError:
        raise ConfigError(f"the transform {name!r} does not exist: {module_name} has no {path}") from None


def check_input(returned: Any, stage: str) -> StageInput | None:
    """Return the result of a transform as a `StageInput`; None for None. StageError: it is empty, or no input."""
    if returned is None:
        return None
    given = returned if isinstance(returned, StageInput) else _from_shorthand(returned)
    fault = f"returned {_type_of(returned)}" if given is None else _fault(given)
    if given is None or fault:
        raise StageError(f"Stage {stage!r}: its transform {fault}.")
    return given


def _from_shorthand(returned: Any) -> StageInput | None:
    if isinstance(returned, str):
        return StageInput(text=returned)
    if _is_tensor(returned):
        return StageInput(tensor=returned)
    if isinstance(returned, Sequence):
        return StageInput(token_ids=returned)
    return None


def _fault(given: Any) -> str:
    """What is wrong with a transform's result; empty if nothing is."""
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
    # Without torch, whose import takes seconds.
    return callable(getattr(value, "numel", None)) and hasattr(value, "dtype")


def _type_of(value: Any) -> str:
    return f"a value of type {type(value).__name__}"
