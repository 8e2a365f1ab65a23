"""How long tensors take to a Python stage on this node and back: through sockets and through shared memory, as a table.

Two replicas of a stage that gives back what it got, one for each way. They take turns, tensor by tensor, so that both
see the same machine. A round trip lasts from the input handed to the client of the replica until the output is read:
building the request, both directions, the stage's threads, and decoding. The first trips of each size are left out.
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
import uvloop

from vllm_omni_plugin.pipeline.stage import Modality, Stage
from vllm_omni_plugin.pipeline.transfer import StageInput
from vllm_omni_plugin.replicas.engine.running_engine import Engine, start_local_engine
from vllm_omni_plugin.stages.api import PythonStageApi
from vllm_omni_plugin.stages.stage_process import PythonStageLauncher

STAGE = Stage(0, "passing", "passing_stage:Passing", Modality.LATENT)
WARM_UP = 5
KIB = 1 << 10


class Way:
    """One way for tensors.

    Args:
        share_memory: whether it is shared memory.
        executor: where blocking parts run.
    """

    def __init__(self, share_memory: bool, executor: ThreadPoolExecutor) -> None:
        self._launcher = PythonStageLauncher(STAGE, lambda pid: None, share_memory=share_memory)
        self._executor = executor
        self._api = PythonStageApi(STAGE, lambda tokens: "", lambda text: [], end_token=0)
        self._replica: Engine | None = None
        self._answer: asyncio.Future[Any] | None = None
        self._trips = 0

    async def open(self) -> None:
        """Start the replica."""
        self._replica = await start_local_engine(self._launcher, self._api, self._executor, 0, self._received)
        self._replica.on_lost = self._failed

    async def close(self) -> None:
        """End it."""
        if self._replica is not None:
            await self._replica.close(self._executor)

    async def trip(self, tensor: torch.Tensor) -> float:
        """Milliseconds there and back."""
        assert self._replica is not None
        self._trips += 1
        self._answer = asyncio.get_running_loop().create_future()
        source = SimpleNamespace(request_id="", session_id=None)
        began = time.perf_counter()
        request = self._api.build(source, StageInput(tensor=tensor), {}, for_client=False)
        self._replica.client.add_request(request, str(self._trips))
        read = self._api.reader(request).read(await self._answer, True)
        last = read.tensor.view(-1)[-1]
        took = 1000 * (time.perf_counter() - began)
        assert last == tensor.view(-1)[-1]
        return took

    def _received(self, outputs: Any) -> None:
        if self._answer is not None and outputs.outputs:
            self._answer.set_result(outputs.outputs[0])

    def _failed(self, reason: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(RuntimeError(reason))


async def measure(sizes: Sequence[int], trips: int) -> None:
    """Print the table."""
    print("| tensor | sockets: p50, p99, best | shared memory: p50, p99, best | p50 saved |\n|---|---:|---:|---:|")
    with ThreadPoolExecutor(2) as executor:
        ways = (Way(False, executor), Way(True, executor))
        try:
            for way in ways:
                await way.open()
            for size in sizes:
                tensor = torch.arange(size * KIB // 4, dtype=torch.float32)
                durations: list[list[float]] = [[], []]
                for _ in range(WARM_UP + trips):
                    for way, taken in zip(ways, durations, strict=True):
                        taken.append(await way.trip(tensor))
                print(row(size, [taken[WARM_UP:] for taken in durations]), flush=True)
        finally:
            for way in ways:
                await way.close()


def row(size: int, durations: Sequence[Sequence[float]]) -> str:
    """One size: milliseconds."""
    percentiles = [statistics.quantiles(taken, n=100) for taken in durations]
    cells = [f"{of[49]:.2f}, {of[98]:.2f}, {min(taken):.2f}" for of, taken in zip(percentiles, durations, strict=True)]
    name = f"{size // KIB} MiB" if size >= KIB else f"{size} KiB"
    saved = 1 - percentiles[1][49] / percentiles[0][49]
    return f"| {name} | {cells[0]} | {cells[1]} | {saved:.0%} |"


def main() -> None:
    """Measure what the command line names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = [64, 256, 1024, 8192, 32768]
    parser.add_argument("--sizes", type=int, nargs="+", default=sizes, metavar="KIB", help="sizes of tensors, in KiB")
    parser.add_argument("--trips", type=int, default=200, help="round trips of each size and way")
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(measure(args.sizes, args.trips))


if __name__ == "__main__":
    main()
