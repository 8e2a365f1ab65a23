"""Python stages that compute tensors."""

from collections.abc import Sequence

import torch

from tests.fakes.mappings import is_shared
from vllm_omni_plugin.pipeline import StageOutput
from vllm_omni_plugin.stages import PythonStage, StageJob

SPARSE = StageOutput(tensor=torch.eye(3).to_sparse())


class Doubling(PythonStage):
    """Returns its input doubled and transposed, not contiguous and with gradients; for text a sparse tensor."""

    def start(self) -> None:
        self._weights = torch.nn.Parameter(torch.tensor(2.0, device=self.device))

    def compute(self, jobs: Sequence[StageJob]) -> Sequence[StageOutput | Exception]:
        return [SPARSE if job.input.tensor is None else self._double(job.input.tensor) for job in jobs]

    def _double(self, tensor: torch.Tensor) -> StageOutput:
        facts = {"device": self.device, "threads": torch.get_num_threads(), "dtype": str(tensor.dtype)}
        turned = tensor.T if tensor.ndim == 2 else tensor
        return StageOutput(tensor=self._weights.to(tensor.dtype) * turned, metadata=facts)


class Keeping(PythonStage):
    """Returns its input, and keeps a reference to the first input."""

    def compute(self, jobs: Sequence[StageJob]) -> Sequence[StageOutput | Exception]:
        self._first = getattr(self, "_first", jobs[0])
        return [StageOutput(tensor=job.input.tensor, metadata=_way(job.input.tensor)) for job in jobs]


def _way(tensor: torch.Tensor) -> dict[str, bool]:
    return {"shared": is_shared(tensor.data_ptr())}
