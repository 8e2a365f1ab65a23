"""The compared policies, by name."""

import inspect
import random
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from simulator.head import Policy
from simulator.omniscient import Omniscient
from simulator.peers import LMetric, PlainRoundRobin, SglangCacheAware, StaleLeastQueue, VllmDataParallel
from vllm_omni_plugin.balancing import LoadBalancingPolicy, build_load_balancer_factory

OMNISCIENT = "omniscient"

PEERS: Mapping[str, Callable[[random.Random], Policy]] = MappingProxyType(
    {
        "peer: round robin": PlainRoundRobin,
        "peer: stale least queue": StaleLeastQueue,
        "peer: vLLM DP": VllmDataParallel,
        "peer: LMetric": LMetric,
        "peer: SGLang": SglangCacheAware,
        OMNISCIENT: Omniscient,
    }
)
AT_ONCE = " at once"
"""Suffix of a policy's name: every request is sent at once, none waits at the head."""
OURS = tuple(map(str, LoadBalancingPolicy))


def build(name: str, seed: int) -> Policy:
    """A new policy: a peer's, or any that `--omni-lb-policy` takes, seeded if possible. See also `AT_ONCE`.

    Raises:
        ConfigError: no policy has this name.
    """
    rng = random.Random(seed)
    if name in PEERS:
        return PEERS[name](rng)
    balancer = build_load_balancer_factory(name.removesuffix(AT_ONCE))()
    kind: Any = type(balancer)
    seeded: Any = kind(rng=rng) if "rng" in inspect.signature(kind).parameters else balancer
    if name.endswith(AT_ONCE):
        seeded.binds_late = False
    policy: Policy = seeded
    return policy
