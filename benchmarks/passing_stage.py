"""The stage that `tensors.py` sends its tensors to."""

from collections.abc import Sequence

import torch

from vllm_omni_plugin.pipeline.transfer import StageOutput
from vllm_omni_plugin.stages import PythonStage, StageJob


class Passing(PythonStage):
    """Gives back what it got."""

    def start(self) -> None:
        """As little beside the measurement as can be."""
        torch.set_num_threads(1)

    def compute(self, jobs: Sequence[StageJob]) -> Sequence[StageOutput | Exception]:
        """The same tensors."""
        return [StageOutput(tensor=job.input.tensor) for job in jobs]
