"""Python stages that compute tensors."""

from collections.abc import Sequence

import torch

from tests.fakes.mappings import is_shared
from vllm_omni_plugin.pipeline.transfer import StageOutput
from vllm_omni_plugin.stages import PythonStage, StageJob

SPARSE = StageOutput(tensor=torch.eye(3).to_sparse())


class Doubling(PythonStage):
    """Gives back twice what it got, turned: neither contiguous nor free of a graph of gradients.

    Asked for it with a text it gives what cannot be sent: a tensor without a place for each element.
    """

    def start(self) -> None:
        self._weights = torch.nn.Parameter(torch.tensor(2.0, device=self.device))

    def compute(self, jobs: Sequence[StageJob]) -> Sequence[StageOutput | Exception]:
        """With what it was computed from and by."""
        return [SPARSE if job.input.tensor is None else self._double(job.input.tensor) for job in jobs]

    def _double(self, tensor: torch.Tensor) -> StageOutput:
        facts = {"device": self.device, "threads": torch.get_num_threads(), "dtype": str(tensor.dtype)}
        turned = tensor.T if tensor.ndim == 2 else tensor
        return StageOutput(tensor=self._weights.to(tensor.dtype) * turned, metadata=facts)


class Keeping(PythonStage):
    """Gives back what it got, and never lets go of the first input."""

    def compute(self, jobs: Sequence[StageJob]) -> Sequence[StageOutput | Exception]:
        """Says how it came."""
        self._first = getattr(self, "_first", jobs[0])
        return [StageOutput(tensor=job.input.tensor, metadata=_way(job.input.tensor)) for job in jobs]


def _way(tensor: torch.Tensor) -> dict[str, bool]:
    return {"shared": is_shared(tensor.data_ptr())}
