"""Choosing the replica that runs a request: the contract, the built-in policies and the registry of all of them."""

from vllm_omni_plugin.balancing.base import LoadBalancer, LoadBalancingPolicy, ReplicaView, Task
from vllm_omni_plugin.balancing.least_queue_length import LeastQueueLengthBalancer
from vllm_omni_plugin.balancing.random_policy import RandomBalancer
from vllm_omni_plugin.balancing.registry import build_load_balancer_factory, known_policies
from vllm_omni_plugin.balancing.round_robin import RoundRobinBalancer

__all__ = [
    "LeastQueueLengthBalancer",
    "LoadBalancer",
    "LoadBalancingPolicy",
    "RandomBalancer",
    "ReplicaView",
    "RoundRobinBalancer",
    "Task",
    "build_load_balancer_factory",
    "known_policies",
]
