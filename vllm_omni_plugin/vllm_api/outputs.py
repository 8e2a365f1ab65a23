"""Outputs of engines, refused where vLLM's front end or another engine would fail over them."""

from collections.abc import Sequence
from types import GenericAlias
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.serial_utils import MsgpackDecoder

_ID_LIMIT = 2**31
"""Tokenizers and engines take no token id from here on."""


class OutputsDecoder(MsgpackDecoder):  # type: ignore[misc]
    """Decodes messages of `EngineCoreOutputs`.

    Types and token ids are checked by msgspec as it decodes, which costs nothing; only messages with arrays are looked
    at once more.
    """

    def __init__(self) -> None:
        # Not the vocabulary of the configuration, since the head of a model may be wider than that.
        token = Annotated[int, Meta(ge=0, lt=_ID_LIMIT)]
        options: dict[str, Any] = {"array_like": True, "omit_defaults": True, "gc": False}
        # Fields that are defined again keep their places.
        output = msgspec.defstruct(
            "Output", [("new_token_ids", GenericAlias(list, token))], bases=(EngineCoreOutput,), **options
        )
        outputs: Any = [("outputs", GenericAlias(list, output), msgspec.field(default_factory=list))]
        super().__init__(msgspec.defstruct("Outputs", outputs, bases=(EngineCoreOutputs,), **options))
        self._has_arrays = False

    def dec_hook(self, t: type, obj: Any) -> Any:
        """Called by msgspec for what it cannot decode itself, which of outputs are arrays."""
        self._has_arrays = True
        return super().dec_hook(t, obj)

    def decode(self, bufs: Sequence[Any]) -> Any:
        """The message.

        Raises:
            Exception: it is none, or vLLM's front end would fail over it.
        """
        self._has_arrays = False
        outputs = super().decode(bufs)
        if self._has_arrays:
            for output in outputs.outputs:
                if output.new_logprobs is not None:
                    _check_table("new_logprobs", *output.new_logprobs[:3])
                if output.new_prompt_logprobs_tensors is not None:
                    _check_table("new_prompt_logprobs_tensors", *output.new_prompt_logprobs_tensors[:3])
        return outputs


def _check_table(name: str, ids: Any, logprobs: Any, ranks: Any) -> None:
    """Check log-probabilities: for each position those of several tokens, that of the token itself first."""
    if ids.ndim != 2 or ids.shape != logprobs.shape or ranks.shape != ids.shape[:1]:
        raise ValueError(f"{name}: {ids.shape}, {logprobs.shape}, {ranks.shape} are no shapes of log-probabilities")
    if ids.shape[0] and not ids.shape[1]:
        raise ValueError(f"{name}: {ids.shape[0]} positions without a token")
