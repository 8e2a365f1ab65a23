"""What a replica has to do, as one immutable value that is replaced with every change."""

from typing import NamedTuple


class ReplicaLoad(NamedTuple):
    """The work of one replica at one moment.

    The head's own part is exact: it is charged before a request is sent and released once, at the request's end. What
    the engine reports with its steps is joined to it such that a report never hides what was dispatched after it. While
    nothing of this head is in flight on the replica, all that its engine reported reads 0: nothing would correct it.

    Attributes:
        requests: unfinished requests on the replica: those of this head, and `others`.
        others: unfinished requests that this head did not send: what the other heads report, up to 0.1 s old, or what
            the engine reported if there are no other heads or they cannot be heard.
        prefill_tokens: prompt tokens that are still to be computed: all of a prompt, less what the policy expects to be
            cached, until its first output. Of this head's requests, and of those that other heads report.
        decode_tokens: tokens of prompt and answer of this head's requests that have had their first output.
        waiting: requests the engine said it had not begun.
        running: requests the engine said it had begun.
        kv_usage: share of its KV memory in use, 0 to 1, as the engine said.
        prefill_rate: tokens counted in `prefill_tokens` that it was seen to finish per second of the time in which
            there were any, recent ones weighing more; 0 before the first.
        kv_blocks: blocks of KV memory; 0 if unknown.
        block_size: tokens in a block; 0 if unknown.
        heads_report: whether `others` is what other heads report, and `prefill_tokens` has theirs in it.
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


def load_of(replica: object) -> ReplicaLoad:
    """The load of a replica. All requests of one that says nothing but its queue length count as others'."""
    try:
        load = replica.load  # type: ignore[attr-defined]
    except AttributeError:
        load = None
    if isinstance(load, ReplicaLoad):
        return load
    length = replica.queue_length  # type: ignore[attr-defined]
    return ReplicaLoad(requests=length, others=length)
