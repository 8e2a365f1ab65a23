"""What the contexts on a replica cost a request that joins them."""

from vllm_omni_plugin.balancing.loads.replica_load import ReplicaLoad

DECODE_WEIGHT = 0.01
"""Cost of a token of a context that is being decoded. Chosen in simulations: 0.02 and 0.05 cost
conversations more of their caches, and gained long contexts nothing beside the KV pressure."""
KV_TOKENS = 1500.0
"""Cost of a half-full KV memory: 0.15 s of an 8B model on one accelerator."""
_FULLEST = 0.99
"""Upper bound of the KV usage, so that the cost stays finite."""


def context_cost(load: ReplicaLoad, decode_weight: float = DECODE_WEIGHT, kv_tokens: float = KV_TOKENS) -> float:
    """The decode work and KV pressure of a replica in prompt tokens: the same term in all policies that weigh costs.

        decode_weight * decode_tokens + kv_tokens * k / (1 - k)

    Each step reads the contexts of all sequences, so long ones delay all. `k` is the KV usage: a request that finds the
    memory full waits until others end, or makes vLLM preempt and compute one of them again.

    Source: the decode blocks in the cost of NVIDIA Dynamo's KV router, where a block that is decoded counts as much as
    one to be computed. llm-d scores replicas by their KV usage, and vLLM multiplies waiting requests with it; that the
    cost grows like the queue of an M/M/1 server needs no threshold.
    """
    usage = load.kv_usage
    if usage > _FULLEST:
        usage = _FULLEST
    return decode_weight * load.decode_tokens + kv_tokens * usage / (1.0 - usage)
