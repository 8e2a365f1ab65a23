"""Makes a stage compute for as long as a test likes."""

import os
from pathlib import Path

from tests.fakes.conditions import eventually
from vllm_omni_plugin.pipeline import StageInput


class Gate:
    """A FIFO that the computation of `job` waits for."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "gate"
        os.mkfifo(self._path)
        self._end = -1

    @property
    def job(self) -> StageInput:
        return StageInput(text="slow", metadata={"wait_for": str(self._path)})

    async def reached(self) -> None:
        """Return once a computation waits."""
        await eventually(self._open, "the computation")

    def release(self) -> None:
        os.close(self._end)

    def _open(self) -> bool:
        try:
            end = os.open(self._path, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            return False
        if self._end >= 0:
            self.release()
        self._end = end
        return True
