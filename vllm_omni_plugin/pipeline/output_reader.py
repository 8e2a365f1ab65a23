"""Reads the engine outputs of one run of a stage, and joins consecutive outputs."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from vllm_omni_plugin.pipeline.transfer import StageOutput


class OutputReader(ABC):
    """Reads the outputs of one run of a stage, in order."""

    def __init__(self) -> None:
        self._outputs: list[StageOutput] = []

    def read(self, output: Any, ended: bool) -> StageOutput:
        """Return the new content of an `EngineCoreOutput`. Cheap: it runs on the orchestrator's loop.

        `ended`: it is the run's last. Text ends before a character whose tokens are incomplete, and before a stop
        string. There, `finish_reason` is set although the engine goes on; the caller must abort it.
        """
        read = self._read(output, ended)
        self._outputs.append(read)
        return read

    @property
    def whole(self) -> StageOutput:
        """All outputs so far, joined."""
        return joined(self._outputs) if self._outputs else StageOutput()

    @abstractmethod
    def _read(self, output: Any, ended: bool) -> StageOutput:
        """See `read`."""


def joined(outputs: Sequence[StageOutput]) -> StageOutput:
    """Join one or more consecutive outputs of a stage; tensors are joined along their first dimension."""
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
    # torch has been imported, since there are tensors.
    return sys.modules["torch"].cat(tensors)
