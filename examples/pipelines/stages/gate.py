"""Returns an answer, or a refusal if a classifier rates it as unsafe."""

from collections.abc import Sequence

from vllm_omni_plugin.pipeline import StageOutput
from vllm_omni_plugin.stages import PythonStage, StageJob


class Gate(PythonStage):
    """Returns its input text, or `refusal` if the input's `metadata["unsafe"]` is at least `threshold`."""

    def __init__(self, *, threshold: float, refusal: str, device: str) -> None:
        super().__init__(device=device)
        self._threshold = threshold
        self._refusal = refusal

    def compute(self, jobs: Sequence[StageJob]) -> list[StageOutput]:
        return [StageOutput(text=self._passed(job)) for job in jobs]

    def _passed(self, job: StageJob) -> str:
        unsafe = job.input.metadata["unsafe"] >= self._threshold
        return self._refusal if unsafe else job.input.text or ""
