"""Calls a user's stage class, catches its errors, and checks that its results can be sent."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from vllm_omni_plugin.errors import StageInputError, text_of
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.pipeline import StageOutput
from vllm_omni_plugin.stages.python_stage import PythonStage, StageJob
from vllm_omni_plugin.vllm_api.codecs.stage_codec import sendable
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import OutputContent

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class StageResult:
    """The output of one job: a `sendable` tensor or None, and the rest of the output or the error."""

    tensor: Any
    content: OutputContent


@dataclass(frozen=True)
class StageRunner:
    """Computes batches for one replica. Its methods are called on the stage's own thread."""

    stage: PythonStage
    name: str

    def compute(self, jobs: Sequence[StageJob]) -> list[StageResult]:
        """A result for each job, in order. The tensors of the jobs are `ReceivedTensor`s."""
        decoded = [self._decode_tensor(job) for job in jobs]
        computed = iter(self._compute([item for item in decoded if isinstance(item, StageJob)]))
        return [next(computed) if isinstance(item, StageJob) else item for item in decoded]

    def _decode_tensor(self, job: StageJob) -> StageJob | StageResult:
        if job.input.tensor is None:
            return job
        try:
            return replace(job, input=replace(job.input, tensor=job.input.tensor.to_torch()))
        except Exception as error:  # torch raises many types for wrong sizes and dtypes
            return self._failure(TypeError(f"its input is not a valid tensor: {error}"))

    def _compute(self, jobs: Sequence[StageJob]) -> list[StageResult]:
        """The results of a batch; an error, or a wrong number of them, fails all of it."""
        if not jobs:
            return []
        try:
            returned = list(self.stage.compute(jobs))
            if len(returned) != len(jobs):
                raise TypeError(f"compute returned {len(returned)} results for {len(jobs)} jobs")
        except Exception as error:
            self._log(error, len(jobs))
            return [self._failure(error)] * len(jobs)
        return [self._result(item) for item in returned]

    def _result(self, returned: Any) -> StageResult:
        """One result; an exception in its place fails this request only."""
        try:
            if isinstance(returned, Exception):
                raise returned
            return _checked(returned)
        except Exception as error:
            self._log(error, 1)
            return self._failure(error)

    def _failure(self, error: Exception) -> StageResult:
        """A failed request: 400 for `StageInputError`, 500 for any other error."""
        status, reason = 400, text_of(error)
        if not isinstance(error, StageInputError):
            status, reason = 500, f"{type(self.stage).__name__}: {type(error).__name__}: {reason}"
        return StageResult(None, OutputContent(error=f"Stage '{self.name}': {reason}", status=status))

    def _log(self, error: Exception, requests: int) -> None:
        if not isinstance(error, StageInputError):
            logger.error("Stage '%s' failed %d requests.", self.name, requests, exc_info=error)


def _checked(output: Any) -> StageResult:
    """Raises TypeError, or an error of torch, if the output cannot be sent."""
    if not isinstance(output, StageOutput):
        raise TypeError(f"compute returned a {type(output).__name__} instead of a StageOutput")
    try:
        content = msgspec.convert(
            {"text": output.text, "token_ids": list(map(int, output.token_ids)), "metadata": dict(output.metadata)},
            OutputContent,
        )
        # A failure later would lose the whole message, with the outputs of other requests.
        msgspec.msgpack.encode(content)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"compute returned a StageOutput that cannot be sent: {error}") from error
    return StageResult(_on_cpu(output.tensor), content)


def _on_cpu(tensor: Any) -> Any:
    if tensor is None:
        return None
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise TypeError(f"compute returned a StageOutput whose tensor is a {type(tensor).__name__}")
    return sendable(tensor)
