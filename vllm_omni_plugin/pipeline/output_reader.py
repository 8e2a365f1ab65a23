"""Reading the outputs of one run of a stage, and joining consecutive ones."""

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
        """What an `EngineCoreOutput` adds to those before it. Cheap enough for the loop of the orchestrator.

        Text is complete up to characters whose tokens are still to come. A stop string ends the text before it: then
        `finish_reason` is set although the engine goes on, and the caller aborts it.

        Args:
            output: of the engine.
            ended: the run ends with it; the end of one turn of a streaming-input session does not count.
        """
        read = self._read(output, ended)
        self._outputs.append(read)
        return read

    @property
    def whole(self) -> StageOutput:
        """All that has been read, joined."""
        return joined(self._outputs) if self._outputs else StageOutput()

    @abstractmethod
    def _read(self, output: Any, ended: bool) -> StageOutput:
        """What `read` returns."""


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
    # There are tensors, so torch has been imported.
    return sys.modules["torch"].cat(tensors)
