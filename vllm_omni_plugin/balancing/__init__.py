"""Choosing the replica that runs a request: the contract, the built-in policies and the registry of all of them."""

from vllm_omni_plugin.balancing.base import (
    CacheChange,
    Candidate,
    DecidingBalancer,
    Decision,
    LoadBalancer,
    LoadBalancingPolicy,
    Observer,
    ReplicaView,
    Task,
)
from vllm_omni_plugin.balancing.cost_aware import CostAwareBalancer
from vllm_omni_plugin.balancing.least_queue_length import LeastQueueLengthBalancer
from vllm_omni_plugin.balancing.least_tokens import LeastTokensBalancer
from vllm_omni_plugin.balancing.load import ReplicaLoad, load_of
from vllm_omni_plugin.balancing.power_of_two import PowerOfTwoBalancer
from vllm_omni_plugin.balancing.prefix_policy import KvAwareBalancer, PrefixBalancer
from vllm_omni_plugin.balancing.prompt import MediaSpan, Prompt
from vllm_omni_plugin.balancing.random_policy import RandomBalancer
from vllm_omni_plugin.balancing.registry import build_load_balancer_factory, known_policies
from vllm_omni_plugin.balancing.round_robin import RoundRobinBalancer
from vllm_omni_plugin.balancing.session import SessionBalancer

__all__ = [
    "CacheChange",
    "Candidate",
    "CostAwareBalancer",
    "DecidingBalancer",
    "Decision",
    "KvAwareBalancer",
    "LeastQueueLengthBalancer",
    "LeastTokensBalancer",
    "LoadBalancer",
    "LoadBalancingPolicy",
    "MediaSpan",
    "Observer",
    "PowerOfTwoBalancer",
    "PrefixBalancer",
    "Prompt",
    "RandomBalancer",
    "ReplicaLoad",
    "ReplicaView",
    "RoundRobinBalancer",
    "SessionBalancer",
    "Task",
    "build_load_balancer_factory",
    "known_policies",
    "load_of",
]
