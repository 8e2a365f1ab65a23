"""What the files of pipelines name: a Python stage, a transform, and what is neither."""

from collections.abc import Mapping, Sequence

from vllm_omni_plugin.pipeline import StageInput, StageOutput, Transfer
from vllm_omni_plugin.stages import PythonStage, StageJob


class Vocoder(PythonStage):
    """Takes one option and puts nothing out."""

    def __init__(self, *, device: str, rate: int = 24000) -> None:
        self.rate = rate

    def compute(self, jobs: Sequence[StageJob]) -> Sequence[StageOutput | Exception]:
        return [StageOutput() for _ in jobs]

    @staticmethod
    def cost(given: StageInput) -> int:
        return 100


def speak(outputs: Mapping[str, StageOutput], transfer: Transfer) -> str:
    """A transform."""
    return "w1"


class NoStage:
    """Not a Python stage."""
