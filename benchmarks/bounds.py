"""The best that late binding could reach: a bound of the p99 TTFT for every scheduler, and the p99 of one ideal queue.

    python benchmarks/bounds.py --seed 0

Milliseconds under `bursty` and `tenants`, and ratios to the first column:

at once     the best policy that sends every request at once
late        `prefix`, which binds late, see benchmarks/simulate.py
bound       no scheduler is faster on these engines, even if it knows all future requests
one queue   each engine fills a step from one queue when the step starts, without link latency: see `OneQueue`
one ahead   the same, filled when the step before starts, so that no engine waits for its head
"""

import argparse
from collections import defaultdict
from collections.abc import Sequence
from heapq import heapreplace
from math import ceil, floor

import numpy as np
from simulate import Run, simulate
from simulator.one_queue import OneQueue
from simulator.profiles import profile
from simulator.requests import Request
from simulator.simulation import LINK_S
from simulator.workload import Scale
from simulator.workloads import WORKLOADS

from vllm_omni_plugin.sim import EngineSettings

_SHARE = 0.99
_PRECISION_S = 0.0005
_CONTEXT_TOKENS = 6000
"""Of each tenant under `tenants`."""
_AT_ONCE = ("prefix at once", "least-tokens at once")
"""No other policy of benchmarks/simulate.py is better under either workload."""
_STEP_TOKENS = {False: 1024, True: 1536}
"""By `ahead`: the best of 768, 1,024, 1,536 and 2,048."""


def bound_alone(settings: EngineSettings, prompts: Sequence[int]) -> float:
    """Seconds: no request is faster than alone in an engine, so neither is the 99th percentile.

    Args:
        prompts: tokens of each prompt, none of them cached.
    """
    steps = [ceil(tokens / settings.max_num_batched_tokens) for tokens in prompts]
    alone = [settings.duration(tokens, 0) + (n - 1) * settings.step_s for tokens, n in zip(prompts, steps, strict=True)]
    return 2 * LINK_S + float(np.quantile(alone, _SHARE))


def bound_contexts(settings: EngineSettings, replicas: int, tokens: int, arrivals: Sequence[Sequence[float]]) -> float:
    """Seconds: an engine must compute a whole context before the first token of any request that starts with it.

    All other work of the engines is ignored. The scheduler may choose which contexts come last: those with the fewest
    waiting requests.

    Args:
        tokens: of each context.
        arrivals: for each context, the times of its requests in order.
    """
    needed_s = tokens * (settings.prefill_token_s + settings.step_s / settings.max_num_batched_tokens)
    # All contexts take equally long, so no order has more of them ready at any time than the order of arrival.
    ready: list[float] = []
    free = [0.0] * replicas
    for arrived in sorted(times[0] for times in arrivals):
        ready.append(max(free[0], arrived + LINK_S) + needed_s)
        heapreplace(free, ready[-1])
    ready.sort()
    total = sum(map(len, arrivals))
    may_be_later = total - 1 - floor(_SHARE * (total - 1))

    def is_possible(ttft: float) -> bool:
        for number, at in enumerate(ready):
            # Until then at most `number` contexts are ready: earlier requests of all other contexts are too late.
            later = sorted(np.searchsorted(times, at + LINK_S - ttft) for times in arrivals)
            if sum(later[: len(ready) - number]) > may_be_later:
                return False
        return True

    low, high = 0.0, ready[-1] + LINK_S
    while high - low > _PRECISION_S:
        middle = (low + high) / 2
        low, high = (low, middle) if is_possible(middle) else (middle, high)
    return low


def bound(name: str, scale: Scale) -> float:
    """The bound in seconds, under `bursty` or `tenants`."""
    requests = _requests(name, scale)
    if name == "bursty":
        return bound_alone(scale.settings, [request.prompt_tokens for request in requests])
    arrivals = defaultdict(list)
    for request in requests:
        arrivals[request.session].append(request.arrived)
    return bound_contexts(scale.settings, scale.replicas, _CONTEXT_TOKENS, list(arrivals.values()))


def one_queue(scale: Scale, ahead: bool) -> float:
    """The p99 of one queue in seconds, under `bursty`."""
    queue = OneQueue(scale.settings, scale.replicas, _STEP_TOKENS[ahead], ahead)
    return float(np.quantile(queue.run(_requests("bursty", scale)), _SHARE))


def of_workload(name: str, scale: Scale) -> dict[str, float]:
    """The columns in seconds."""

    def simulated(policy: str) -> float:
        return simulate(scale, Run(name, policy)).summary.ttft[-1]

    columns = {"at once": min(map(simulated, _AT_ONCE)), "late": simulated("prefix"), "bound": bound(name, scale)}
    if name == "bursty":
        columns |= {"one queue": one_queue(scale, ahead=False), "one ahead": one_queue(scale, ahead=True)}
    return columns


def _requests(name: str, scale: Scale) -> list[Request]:
    requests = []
    for session in WORKLOADS[name](scale).sessions:
        session.turns[0].arrived = session.starts
        requests += session.turns
    return requests


def main() -> None:
    """Print both rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=32)
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    scale = Scale(options.replicas, options.requests, profile("accelerator"), options.seed)
    for name in ("bursty", "tenants"):
        columns = of_workload(name, scale)
        cells = [f"{column} {1000 * ttft:,.0f} ({ttft / columns['at once']:.2f})" for column, ttft in columns.items()]
        print(f"{name}: {', '.join(cells)}", flush=True)


if __name__ == "__main__":
    main()
