"""Consecutive outputs of a stage put together."""

from collections.abc import Sequence
from typing import Any

from vllm_omni_plugin.pipeline.transfer import StageOutput


def joined(outputs: Sequence[StageOutput]) -> StageOutput:
    """Consecutive outputs of one stage as one; tensors are joined along their first dimension. At least one."""
    if len(outputs) == 1:
        return outputs[0]
    metadata: dict[str, Any] = {}
    for output in outputs:
        metadata |= output.metadata
    return StageOutput(
        token_ids=[token for output in outputs for token in output.token_ids],
        text="".join(output.text for output in outputs),
        tensor=_concatenated([output.tensor for output in outputs if output.tensor is not None]),
        metadata=metadata,
        finish_reason=outputs[-1].finish_reason,
    )


def _concatenated(tensors: list[Any]) -> Any:
    if len(tensors) < 2:
        return tensors[0] if tensors else None
    import torch

    return torch.cat(tensors)
