"""Lets an answer through, or refuses it, by a classifier's verdict."""

from collections.abc import Sequence

from vllm_omni_plugin.pipeline.transfer import StageOutput
from vllm_omni_plugin.stages import PythonStage, StageJob


class Gate(PythonStage):
    """Puts out the text it is given unless its `metadata["unsafe"]` reaches the threshold.

    Args:
        threshold: probability from which on an answer is refused.
        refusal: what is said in its place.
        device: not used.
    """

    def __init__(self, *, threshold: float, refusal: str, device: str) -> None:
        super().__init__(device=device)
        self._threshold = threshold
        self._refusal = refusal

    def compute(self, jobs: Sequence[StageJob]) -> list[StageOutput]:
        """One text for each job."""
        return [StageOutput(text=self._passed(job)) for job in jobs]

    def _passed(self, job: StageJob) -> str:
        unsafe = job.input.metadata["unsafe"] >= self._threshold
        return self._refusal if unsafe else job.input.text or ""
