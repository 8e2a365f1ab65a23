"""Load balancing: chooses the replica that runs a request. Imports only `errors`, neither vLLM nor torch.

`policies` has the built-in policies; `caches` and `loads` have their data. Start with `interface`, which is enough for
third-party policies. `registry` finds a policy by its name. Other packages import from here.
"""

from vllm_omni_plugin.balancing.interface import (
    CacheChange,
    Candidate,
    DecidingBalancer,
    Decision,
    LoadBalancer,
    LoadBalancingPolicy,
    MediaSpan,
    PolicyHooks,
    Prompt,
    ReplicaView,
    Task,
)
from vllm_omni_plugin.balancing.policies.least_queue_length import LeastQueueLengthBalancer
from vllm_omni_plugin.balancing.policies.least_tokens import LeastTokensBalancer
from vllm_omni_plugin.balancing.policies.prefix_policy import KvAwareBalancer, PrefixBalancer
from vllm_omni_plugin.balancing.policies.random_policy import RandomBalancer
from vllm_omni_plugin.balancing.policies.round_robin import RoundRobinBalancer
from vllm_omni_plugin.balancing.policies.session import SessionBalancer
from vllm_omni_plugin.balancing.registry import build_load_balancer_factory, known_policies
from vllm_omni_plugin.balancing.replica_adapters import ReplicaAdapters
from vllm_omni_plugin.balancing.replica_load import ReplicaLoad, load_of
from vllm_omni_plugin.balancing.sampling import ServingReplicas, UnreportedRequests, expected_arrivals, pick_lowest

__all__ = [
    "CacheChange",
    "Candidate",
    "DecidingBalancer",
    "Decision",
    "KvAwareBalancer",
    "LeastQueueLengthBalancer",
    "LeastTokensBalancer",
    "LoadBalancer",
    "LoadBalancingPolicy",
    "MediaSpan",
    "PolicyHooks",
    "PrefixBalancer",
    "Prompt",
    "RandomBalancer",
    "ReplicaAdapters",
    "ReplicaLoad",
    "ReplicaView",
    "RoundRobinBalancer",
    "ServingReplicas",
    "SessionBalancer",
    "Task",
    "UnreportedRequests",
    "build_load_balancer_factory",
    "expected_arrivals",
    "known_policies",
    "load_of",
    "pick_lowest",
]
