"""A calm tenant beside a flooding one, simulated: with normal and with large headroom.

    python benchmarks/flood_simulated.py --replicas 2 3 5 --seeds 12

Engines, prompts, answers and rates are those of flood.py. With `--accelerator`, engines are those of the profile
`accelerator`, prompts have about 512 tokens and answers about 128.
"""

import argparse
import random
from collections.abc import Callable, Iterator, Sequence
from heapq import merge
from itertools import takewhile
from typing import NamedTuple

import numpy as np
from flood import CALM, FLOOD, WARM_UP_S
from overload import DEADLINE_S, MAX_NUM_SEQS, SERVICE_TIMES
from simulator.contenders import build
from simulator.metrics import Metrics
from simulator.profiles import accelerator
from simulator.requests import Request, Session
from simulator.simulation import Simulation
from simulator.traffic import Requests, length, poisson, tokens
from simulator.workload import Scale, Workload

from vllm_omni_plugin.admission import AdmissionConfig, HeadroomSize, RequestClass, RequestTerms
from vllm_omni_plugin.sim import EngineSettings

_HEAD = """\
| engines | headroom | calm: requests | alone: TTFT p50 / p99, ms | beside the flood | p99 to alone | flood, answers/s |
|---:|---|---:|---:|---:|---:|---:|"""
_FLOOD_FIRST = 1_000_000
"""The number of the flood's first request; the calm tenant sends less."""


class Load(NamedTuple):
    """Engines, and the requests that they get.

    Attributes:
        capacity: requests per second of one saturated engine.
        lengths: draws the tokens of a prompt and of its answer.
    """

    settings: EngineSettings
    capacity: float
    lengths: Callable[[random.Random], tuple[int, int]]


SLEEPING = Load(
    EngineSettings(**SERVICE_TIMES, max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=1024),  # type: ignore[arg-type]
    22.1 / 3,
    lambda rng: (rng.randint(50, 200), rng.randint(24, 72)),
)
ACCELERATOR = Load(
    accelerator(),
    Scale(1, 0, accelerator()).rate(1.4, 512, 128),
    lambda rng: (length(rng, 512, 0.5, 2048), length(rng, 128, 0.5, 512)),
)


class Answered(Metrics):
    """Keeps the answered requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[Request] = []

    def answered(self, request: Request) -> None:
        self.requests.append(request)


def main() -> None:
    """Run everything and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[3])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=100.0, help="of each run; the first 10 do not count")
    parser.add_argument("--accelerator", action="store_true")
    options = parser.parse_args()
    load = ACCELERATOR if options.accelerator else SLEEPING
    print(_HEAD)
    for replicas in options.replicas:
        alone = _ttfts(_run(load, replicas, options, {"calm": CALM}))
        for headroom in HeadroomSize:
            both = _run(load, replicas, options, {"calm": CALM, "flood": FLOOD}, headroom)
            beside = _ttfts(both)
            flood = sum(each.terms.tenant == "flood" and _counts(each.finished, options.seconds) for each in both)
            cells = [str(replicas), headroom, str(len(beside)), _quantiles(alone), _quantiles(beside)]
            cells.append(f"{np.quantile(beside, 0.99) / np.quantile(alone, 0.99):.2f}")
            cells.append(f"{flood / (options.seconds - WARM_UP_S) / options.seeds:.1f}")
            print(f"| {' | '.join(cells)} |", flush=True)


def _run(
    load: Load,
    replicas: int,
    options: argparse.Namespace,
    tenants: dict[str, float],
    headroom: HeadroomSize = HeadroomSize.NORMAL,
) -> list[Request]:
    """The answered requests of all seeds."""
    config = AdmissionConfig(classes=(RequestClass(name="interactive", deadline=DEADLINE_S),), headroom=headroom)
    answered = Answered()
    for seed in range(options.seeds):
        sessions = [
            _sessions(load, load.capacity * replicas * factor, options.seconds, tenant, seed + place)
            for place, (tenant, factor) in enumerate(tenants.items())
        ]
        workload = Workload(merge(*sessions, key=lambda session: session.starts), admission=config)
        simulation = Simulation(workload, build("prefix", seed), load.settings, replicas)
        simulation.metrics = answered
        simulation.run()
    return answered.requests


def _sessions(load: Load, rate: float, seconds: float, tenant: str, seed: int) -> Iterator[Session]:
    rng = random.Random(seed)
    requests = Requests(rng, RequestTerms(tenant), first=_FLOOD_FIRST if tenant == "flood" else 0)
    for start in takewhile(lambda start: start <= seconds, poisson(rng, rate)):
        prompt, answer = load.lengths(rng)
        yield Session(start, [requests.make(tokens(rng, prompt), answer, answer)])


def _ttfts(requests: Sequence[Request]) -> list[float]:
    """Seconds to the first token of the calm tenant's requests that count."""
    return [
        each.first_token - each.arrived
        for each in requests
        if each.terms.tenant == "calm" and each.arrived >= WARM_UP_S and each.first_token is not None
    ]


def _counts(finished: float | None, seconds: float) -> bool:
    return finished is not None and WARM_UP_S <= finished <= seconds


def _quantiles(ttfts: Sequence[float]) -> str:
    return " / ".join(f"{each * 1e3:.0f}" for each in np.quantile(ttfts, (0.5, 0.99)))


if __name__ == "__main__":
    main()
