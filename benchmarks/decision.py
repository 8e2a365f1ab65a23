"""How long it takes to decide where a request goes, for each load-balancing policy, as a Markdown table.

Every pick goes through a stage pool whose loads change between picks as they do in service: requests are charged, give
their first outputs and end; engines report their load, and that they have cached what they were sent. Prompts of 4,096
tokens share prefixes in groups; sessions are drawn from a few thousand. Columns:

pick    choosing the replica, without the hashing of the prompt, which is done once per request and timed apart
charge  accounting for the request and telling the policy, before it is sent
all     both, and what the pool does for a first output, two reports of an engine and the end of a request

Each is timed alone, so the figures include the cost of reading the clock (about 0.1 microseconds).
"""

import argparse
import statistics
from collections import deque
from random import Random
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

from vllm_omni_plugin.balancing import CacheChange, Prompt, Task, build_load_balancer_factory, known_policies
from vllm_omni_plugin.balancing.caches.block_keys import prompt_keys
from vllm_omni_plugin.orchestrator import PoolMember, StagePool, StageRun
from vllm_omni_plugin.replicas.links.engine_client import EngineClient
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize, LoadReport

PROMPT_TOKENS = 4096
SHARED_TOKENS = 3072
GROUPS = 100
SESSIONS = 4000
BLOCK_SIZE = 16
REQUESTS_PER_REPLICA = 8


class Quantiles(NamedTuple):
    """Of durations, in microseconds."""

    p50: float
    p99: float


def quantiles(durations_ns: list[int]) -> Quantiles:
    """The median and the 99th percentile."""
    percentiles = statistics.quantiles(durations_ns, n=100)
    return Quantiles(percentiles[49] / 1000, percentiles[98] / 1000)


class Traffic:
    """Requests of a seeded sequence, whose prompts share prefixes in groups."""

    def __init__(self) -> None:
        self._rng = Random(1)
        self._prefixes = [self._tokens(SHARED_TOKENS) for _ in range(GROUPS)]
        self._count = 0

    def next(self) -> Task:
        """One request."""
        self._count += 1
        token_ids = self._rng.choice(self._prefixes) + self._tokens(PROMPT_TOKENS - SHARED_TOKENS)
        session = f"session-{self._rng.randrange(SESSIONS)}"
        return {
            "request_id": f"request-{self._count}",
            "prompt": Prompt(token_ids),
            "session": session,
            "max_tokens": 256,
        }

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(32000), k=count)


class Service:
    """A stage pool in service, with a steady number of requests in flight."""

    def __init__(self, policy: str, replicas: int) -> None:
        self.pick_ns: list[int] = []
        self.charge_ns: list[int] = []
        self.all_ns: list[int] = []
        self._pool = StagePool(0, build_load_balancer_factory(policy)(), policy=policy)
        for replica_id in range(replicas):
            # Nothing is sent: the pool only asks whether there is a client.
            client = cast(EngineClient, object())
            address = f"tcp://10.0.0.1:{replica_id}"
            self._pool.serve(self._pool.add(replica_id), client, address, address, EngineSize(50_000, BLOCK_SIZE))
        self._limit = replicas * REQUESTS_PER_REPLICA
        self._prefilling: deque[tuple[PoolMember, StageRun]] = deque()
        self._decoding: deque[tuple[PoolMember, StageRun]] = deque()

    def place(self, task: Task) -> None:
        """Place one request, and let the service go on by one."""
        keys = prompt_keys(task["prompt"], BLOCK_SIZE)
        request: Any = SimpleNamespace(request_id=task["request_id"])
        state = StageRun(task["request_id"], request, 0.0)
        begin = perf_counter_ns()
        member, decision = self._pool.decide(task)
        picked = perf_counter_ns()
        charge = perf_counter_ns()
        state.assign(member.replica_id, task["request_id"], task, decision, picked / 1e9)
        self._pool.charge(member, state)
        charged = perf_counter_ns()
        self.pick_ns.append(picked - begin)
        self.charge_ns.append(charged - charge)
        self._prefilling.append((member, state))
        if self._pool.wants_cache_events:
            self._pool.cache_changed(member, CacheChange(stored=keys))
        self._go_on()
        self.all_ns.append(perf_counter_ns() - begin)

    def _go_on(self) -> None:
        if len(self._prefilling) > self._limit // 4:
            member, state = self._prefilling.popleft()
            self._pool.add_first_output(member, state, cached_tokens=None)
            state.output_tokens += 1
            member.ledger.add_tokens(1, decoding=True)
            self._pool.report(member, LoadReport(0, len(member.in_flight), 0.4))
            self._decoding.append((member, state))
        if len(self._decoding) > self._limit - self._limit // 4:
            member, state = self._decoding.popleft()
            self._pool.release(state)
            self._pool.report(member, LoadReport(0, len(member.in_flight), 0.4))


def time_hashing(traffic: Traffic) -> Quantiles:
    """What the keys of a prompt's blocks take."""
    durations: list[int] = []
    for _ in range(300):
        prompt = traffic.next()["prompt"]
        begin = perf_counter_ns()
        prompt_keys(prompt, BLOCK_SIZE)
        durations.append(perf_counter_ns() - begin)
    return quantiles(durations)


def time_policy(policy: str, replicas: int, picks: int) -> tuple[Quantiles, Quantiles, Quantiles]:
    """What picks, charges and all of a request take, once the fleet is as busy as it gets."""
    service, traffic = Service(policy, replicas), Traffic()
    warm_up = replicas * REQUESTS_PER_REPLICA + SESSIONS
    for _ in range(warm_up + picks):
        service.place(traffic.next())
    pick, charge, whole = service.pick_ns, service.charge_ns, service.all_ns
    return quantiles(pick[warm_up:]), quantiles(charge[warm_up:]), quantiles(whole[warm_up:])


def main() -> None:
    """Print one row for each policy and number of replicas."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=known_policies(), help="names (default: all installed)")
    parser.add_argument("--replicas", nargs="+", type=int, default=[64, 1024], help="sizes of the fleet")
    parser.add_argument("--picks", type=int, default=5000, help="picks timed for each row")
    args = parser.parse_args()
    hashing = time_hashing(Traffic())
    print(f"Hashing {PROMPT_TOKENS} prompt tokens: p50 {hashing.p50:.0f} us, p99 {hashing.p99:.0f} us.\n")
    print("| policy | replicas | pick: p50 us | p99 us | charge: p50 us | p99 us | all: p50 us | p99 us |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for policy in args.policies:
        for size in args.replicas:
            times = [time for quantiles_of in time_policy(policy, size, args.picks) for time in quantiles_of]
            print("|", policy, "|", size, "|", " | ".join(f"{time:.2f}" for time in times), "|", flush=True)


if __name__ == "__main__":
    main()
