"""The load of a replica, as an immutable value, and what the contexts on it cost a request that joins them."""

from typing import NamedTuple

from vllm_omni_plugin.balancing.replica_adapters import NO_ADAPTERS, ReplicaAdapters


class ReplicaLoad(NamedTuple):
    """The load of one replica at one moment.

    This head's own part is exact: charged before a request is sent, taken off when it leaves. While this head has no
    request on the replica, all engine-reported fields are 0, because nothing would correct them.

    Attributes:
        requests: unfinished requests on the replica, of this head and `others`.
        others: unfinished requests that this head did not send: as the other heads report them (up to 0.1 s old), or as
            the engine reports them if there are no other heads or they cannot be reached.
        prefill_tokens: uncached prompt tokens before the first output, of this head and as other heads report them.
        decode_tokens: tokens of prompts and answers, of this head's requests that have had a first output.
        waiting, running: requests that the engine reports as not begun, and as begun.
        kv_usage: share of the KV memory in use, 0 to 1, as the engine reports it.
        prefill_rate: measured `prefill_tokens` per second while there were any; 0 if unknown.
        kv_blocks, block_size: blocks of KV memory, and tokens in a block; 0 if unknown.
        heads_report: whether `others` and `prefill_tokens` include the reports of other heads.
        adapters: LoRA adapters that are loaded.
    """

    requests: int = 0
    others: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    waiting: int = 0
    running: int = 0
    kv_usage: float = 0.0
    prefill_rate: float = 0.0
    kv_blocks: int = 0
    block_size: int = 0
    heads_report: bool = False
    adapters: ReplicaAdapters = NO_ADAPTERS


def load_of(replica: object) -> ReplicaLoad:
    """The load of any replica. If it has only a queue length, all its requests count as `others`."""
    load = getattr(replica, "load", None)
    if isinstance(load, ReplicaLoad):
        return load
    length = replica.queue_length  # type: ignore[attr-defined]
    return ReplicaLoad(requests=length, others=length)


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
