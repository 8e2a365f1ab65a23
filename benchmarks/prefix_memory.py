"""Memory and speed of what `prefix` remembers of a fleet whose caches are full, as a Markdown table.

Every replica gets prompts of 256 blocks, of which 64 are shared by all prompts of the same tenant, until its cache is
full; estimated caches get as many again, which replace all that was there. Each is measured in a process of its own, by
the growth of its resident set. Columns:

store  one prompt: what it adds is noted, what it displaces is removed
match  who has how much of a prompt, one of those sent last
"""

import argparse
import random
import statistics
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from time import perf_counter_ns

import psutil

from vllm_omni_plugin.balancing import CacheChange
from vllm_omni_plugin.balancing.caches.block_keys import ROOT, block_key
from vllm_omni_plugin.balancing.caches.prefix_caches import PrefixCaches

PROMPT_BLOCKS = 256
SHARED_BLOCKS = 64
TENANTS = 150
PROBES = 1000


class Prompts:
    """Keys of prompts, each one new, that begin with the system prompt of a random tenant."""

    def __init__(self) -> None:
        self._rng = random.Random(0)
        self._shared = [self._chain(ROOT, SHARED_BLOCKS) for _ in range(TENANTS)]

    def make(self) -> list[int]:
        """The next prompt."""
        shared = self._rng.choice(self._shared)
        return shared + self._chain(shared[-1], PROMPT_BLOCKS - SHARED_BLOCKS)

    def _chain(self, parent: int, blocks: int) -> list[int]:
        keys: list[int] = []
        for _ in range(blocks):
            parent = block_key(parent, self._rng.randbytes(64))
            keys.append(parent)
        return keys


@dataclass
class Measurement:
    """Fills one memory and says what that took.

    Args:
        memory: what is measured.
        store: notes a prompt of a replica, by its bit.
        replicas: number of them.
    """

    memory: PrefixCaches
    store: Callable[[int, list[int]], object]
    replicas: int
    prompts: Prompts = field(default_factory=Prompts)
    resident_before: int = field(default_factory=lambda: psutil.Process().memory_info().rss)

    def fill(self, name: str, blocks: int) -> str:
        """Store prompts that bring so many new blocks altogether. Returns a row of the table."""
        prompts = -(-blocks // (self.replicas * (PROMPT_BLOCKS - SHARED_BLOCKS)))
        last: list[list[int]] = []
        stores: list[int] = []
        for replica in range(self.replicas):
            for _ in range(prompts):
                keys = self.prompts.make()
                stores.append(timed(partial(self.store, replica, keys)))
            last = [*last, keys][-PROBES:]
        resident = psutil.Process().memory_info().rss - self.resident_before
        matches = [timed(partial(self.memory.levels, keys)) for keys in last for _ in range(PROBES // len(last))]
        return (
            f"| {name} | {blocks:,} | {resident / 1e6:,.0f} | {resident / blocks:.0f} "
            f"| {statistics.median(stores) / 1e3:.0f} | {statistics.median(matches) / 1e3:.1f} |"
        )


def timed(action: Callable[[], object]) -> int:
    """Nanoseconds that it takes."""
    start = perf_counter_ns()
    action()
    return perf_counter_ns() - start


def measure_estimated(blocks: int, replicas: int) -> list[str]:
    """Rows of replicas that do not report."""
    caches = PrefixCaches()
    measurement = Measurement(caches, partial(_send, caches, blocks // replicas), replicas)
    return [measurement.fill("estimated, full", blocks), measurement.fill("estimated, all replaced", blocks)]


def measure_reported(blocks: int, replicas: int) -> list[str]:
    """The row of replicas that report what they store."""
    caches = PrefixCaches()
    return [Measurement(caches, partial(_report, caches), replicas).fill("reported, full", blocks)]


def _send(caches: PrefixCaches, capacity: int, replica: int, keys: list[int]) -> None:
    caches.send(replica, keys, capacity)


def _report(caches: PrefixCaches, replica: int, keys: list[int]) -> None:
    caches.change(replica, CacheChange(keys))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=10_000_000, help="of all replicas together")
    parser.add_argument("--replicas", type=int, default=64)
    arguments = parser.parse_args()
    print("| memory | blocks of all replicas | resident, MB | bytes per block | store, us | match, us |")
    print("|---|---:|---:|---:|---:|---:|")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1) as processes:
        for measure in (measure_estimated, measure_reported):
            for row in processes.submit(measure, arguments.blocks, arguments.replicas).result():
                print(row)


if __name__ == "__main__":
    main()
