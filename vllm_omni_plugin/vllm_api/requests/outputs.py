"""Outputs of engines, refused where vLLM's front end or another engine would fail over their tokens."""

from types import GenericAlias
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder

_ID_LIMIT = 2**31
"""Tokenizers and engines take no token id from here on."""


def outputs_decoder() -> Any:
    """A decoder of `EngineCoreOutputs`.

    Types and token ids are checked by msgspec as it decodes, which costs nothing. Arrays are not looked into: over one
    that it cannot use, vLLM's front end fails its request.
    """
    # Not the vocabulary of the configuration, since the head of a model may be wider than that.
    token = Annotated[int, Meta(ge=0, lt=_ID_LIMIT)]
    options: dict[str, Any] = {"array_like": True, "omit_defaults": True, "gc": False}
    # Fields that are defined again keep their places.
    output = msgspec.defstruct(
        "Output", [("new_token_ids", GenericAlias(list, token))], bases=(EngineCoreOutput,), **options
    )
    outputs: Any = [("outputs", GenericAlias(list, output), msgspec.field(default_factory=list))]
    return MsgpackDecoder(msgspec.defstruct("Outputs", outputs, bases=(EngineCoreOutputs,), **options))
