"""How long each load-balancing policy takes to pick a replica, as a Markdown table.

Each pick is timed alone, so the figures include the cost of reading the clock twice (about 0.1 microseconds). Columns:

same  the policy gets the tuple of the pick before, as between two changes of anything
one   one replica has a new view, as after a change of its load
all   every replica has a new view, as after an update of the whole replica list
"""

import argparse
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from time import perf_counter_ns

from vllm_omni_plugin.balancing import LoadBalancer, build_load_balancer_factory, known_policies


@dataclass(frozen=True)
class Replica:
    """A replica as a policy sees it."""

    input_addr: str
    output_addr: str
    stage_id: int
    queue_length: int


def make_fleet(size: int) -> tuple[Replica, ...]:
    """Return `size` replicas with queues of 0 to 12 requests, scattered."""
    return tuple(Replica(f"tcp://10.0.0.1:{port}", f"tcp://10.0.0.2:{port}", 0, port * 7 % 13) for port in range(size))


def with_one_change(fleet: tuple[Replica, ...], times: int) -> Iterator[tuple[Replica, ...]]:
    """Yield the fleet as it is after each of `times` requests, given to its replicas in turn."""
    replicas = list(fleet)
    for index in range(times):
        changed = index % len(replicas)
        replicas[changed] = replace(replicas[changed], queue_length=replicas[changed].queue_length + 1)
        yield tuple(replicas)


def time_picks(balancer: LoadBalancer, fleets: Iterable[Sequence[Replica]]) -> tuple[float, float]:
    """Return the median and the 99th percentile of the time of a pick, in microseconds, over one from each fleet."""
    times: list[int] = []
    for fleet in fleets:
        start = perf_counter_ns()
        balancer.select({}, fleet)
        times.append(perf_counter_ns() - start)
    percentiles = statistics.quantiles(times, n=100)
    return percentiles[49] / 1000, percentiles[98] / 1000


def main() -> None:
    """Print one row for each policy and number of replicas."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=known_policies(), help="names (default: all installed)")
    parser.add_argument("--replicas", nargs="+", type=int, default=[2, 64, 1024], help="sizes of the fleet")
    parser.add_argument("--picks", type=int, default=2000, help="picks timed for each row and column")
    args = parser.parse_args()
    print("| policy | replicas | same: p50 us | p99 us | one: p50 us | p99 us | all: p50 us | p99 us |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for policy in args.policies:
        build = build_load_balancer_factory(policy)
        for size in args.replicas:
            fleet = make_fleet(size)
            same = time_picks(build(), repeat(fleet, args.picks))
            one = time_picks(build(), with_one_change(fleet, args.picks))
            every = time_picks(build(), map(make_fleet, repeat(size, args.picks)))
            print("|", policy, "|", size, "|", " | ".join(f"{time:.2f}" for time in (*same, *one, *every)), "|")


if __name__ == "__main__":
    main()
