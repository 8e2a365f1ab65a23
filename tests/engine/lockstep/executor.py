"""An executor that sleeps instead of computing, and counts its steps."""

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.fakes.sleeping_executor import Iteration, SleepingExecutor

STEP_S = 0.004
EXECUTOR = f"{__name__}.CountingExecutor"
_STEPS_KEY = "counted_steps"


def additional_config(folder: Path) -> dict[str, Any]:
    """What the executor is told: how long a step takes, and where to count."""
    return {"sleeping_executor": {"step_s": STEP_S, "prefill_token_s": 0, "sequence_s": 0}, _STEPS_KEY: str(folder)}


def steps(folder: Path) -> dict[int, int]:
    """Steps that each rank has made since it started last, with requests of its own or without."""
    return {int(file.name): struct.unpack_from("=Q", file.read_bytes())[0] for file in folder.iterdir()}


def indexes(folder: Path) -> dict[int, int]:
    """`data_parallel_index` of each rank."""
    return {int(file.name): struct.unpack("=QQ", file.read_bytes())[1] for file in folder.iterdir()}


class CountingExecutor(SleepingExecutor):
    """A `SleepingExecutor` that counts its steps in a file named by its rank."""

    def new_model(self, vllm_config: Any) -> Any:
        folder, parallel = Path(vllm_config.additional_config[_STEPS_KEY]), vllm_config.parallel_config
        file = folder / str(parallel.data_parallel_rank)
        return _CountingModel(super().new_model(vllm_config), file, parallel.data_parallel_index)


class _CountingModel:
    def __init__(self, model: Any, file: Path, index: int) -> None:
        self.kv_blocks = model.kv_blocks
        self._model = model
        file.write_bytes(struct.pack("=QQ", 0, index))
        with file.open("r+b") as stream:
            self._memory = mmap.mmap(stream.fileno(), 8)

    def compute(self, iteration: Iteration) -> Mapping[str, int]:
        self._count()
        tokens: Mapping[str, int] = self._model.compute(iteration)
        return tokens

    def compute_nothing(self) -> None:
        self._count()
        self._model.compute_nothing()

    def _count(self) -> None:
        (count,) = struct.unpack("=Q", self._memory[:])
        self._memory[:] = struct.pack("=Q", count + 1)
