"""Python stages as users write them, without torch: their processes start at once."""

import atexit
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.pipeline import StageInput, StageOutput
from vllm_omni_plugin.stages import PythonStage, StageJob


class Echo(PythonStage):
    max_batch_size = 4

    def __init__(self, *, device: str, ending: str = "!") -> None:
        super().__init__(device=device)
        self._ending = ending

    def compute(self, jobs: Sequence[StageJob]) -> Sequence[StageOutput | Exception]:
        for job in jobs:
            if "wait_for" in job.input.metadata:
                Path(job.input.metadata["wait_for"]).read_bytes()
        facts = {"batch": len(jobs), "device": self.device, "pid": os.getpid()}
        return [
            StageOutput(
                job.input.token_ids or (), f"{job.input.text}{self._ending}", metadata=facts | job.input.sampling
            )
            for job in jobs
        ]


class Priced(Echo):
    @staticmethod
    def cost(given: StageInput) -> int:
        return given.metadata["cost"]  # type: ignore[no-any-return]


class Unspeakable(Exception):  # noqa: N818  (as a user may name it)
    """Has no text."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Faulty(PythonStage):
    def compute(self, jobs: Sequence[StageJob]) -> Any:
        if any(job.input.text == "raise for all" for job in jobs):
            raise RuntimeError("out of paper")
        if any(job.input.text == "one too many" for job in jobs):
            return [StageOutput()] * (len(jobs) + 1)
        return [self._result(job) for job in jobs]

    def _result(self, job: StageJob) -> Any:
        match job.input.text:
            case "fail":
                return ValueError("no such voice")
            case "no text":
                return Unspeakable()
            case "surrogate":
                return ValueError("no file \udcff")
            case "refuse":
                return StageInputError("speak up")
            case "nothing":
                return None
            case "no tensor":
                return StageOutput(tensor=[1.0])
            case "metadata":
                return StageOutput(metadata={"key": object()})
            case "keys":
                return StageOutput(metadata={1: 2})  # type: ignore[dict-item]
            case "tokens":
                return StageOutput([7, -1])
            case "text":
                return StageOutput(text=b"bytes")  # type: ignore[arg-type]
        return StageOutput(text=job.input.text or "")


class Ending(Echo):
    """Its code ends the process, which exits once somebody reads the file that the input names."""

    def compute(self, jobs: Sequence[StageJob]) -> Sequence[StageOutput | Exception]:
        atexit.register(Path(jobs[0].input.text or "").write_text, "")
        sys.exit()


class Starting(Echo):
    """Starts a process for each batch."""

    def compute(self, jobs: Sequence[StageJob]) -> Sequence[StageOutput | Exception]:
        process = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
        return [StageOutput(metadata={"pid": process.pid}) for _ in jobs]


class Counting(PythonStage):
    def compute(self, jobs: Sequence[StageJob]) -> Sequence[StageOutput | Exception]:
        for job in jobs:
            if job.input.text == "fail":
                return [ValueError("a bad chunk")]
            job.memory["sum"] = job.memory.get("sum", 0) + sum(job.input.token_ids or ())
        return [StageOutput(text=f"{job.memory['sum']}{' in all' if job.last else ''}") for job in jobs]


class CannotStart(PythonStage):
    def __init__(self, *, device: str, how: str) -> None:
        super().__init__(device=device)
        self._how = how

    def start(self) -> None:
        if self._how == "raise":
            raise FileNotFoundError("there are no weights in /nowhere")
        if self._how == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._how == "wait":
            signal.pause()

    def compute(self, jobs: Sequence[StageJob]) -> Sequence[StageOutput | Exception]:
        raise NotImplementedError


class Stopping(Echo):
    """Writes a note in `stop`; if the note is a FIFO, waits for its reader."""

    def __init__(self, *, device: str, note: str) -> None:
        super().__init__(device=device)
        self._note = Path(note)

    def stop(self) -> None:
        self._note.write_text("stopped")


class NoStage:
    """Not a stage."""


class Greedy(Echo):
    """Has an invalid batch size."""

    max_batch_size = 0
