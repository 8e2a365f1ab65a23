"""What the heads of a fleet say to each other through its coordinator. Field names are the wire's keys."""

from typing import Any

from msgspec import Struct

from vllm_omni_plugin.coordinator.messages import Address, Ordinal, QueueLength, StageId


class ReplicaWork(Struct, frozen=True, array_like=True):
    """What one head has in flight on one replica.

    Attributes:
        stage_id: stage of the replica.
        input_addr: address on which it takes requests.
        output_addr: address on which it gives outputs.
        incarnation: the one that the work is on.
        requests: unfinished requests.
        prefill_tokens: prompt tokens of theirs that are still to be computed.
    """

    stage_id: StageId
    input_addr: Address
    output_addr: Address
    incarnation: Ordinal
    requests: QueueLength
    prefill_tokens: Ordinal


class PeerCall(Struct, frozen=True):
    """What another head asks of this one.

    Attributes:
        head_id: who asks.
        call_id: the asker's number for it.
        method: what is asked.
        arguments: plain data of JSON.
    """

    head_id: str
    call_id: int
    method: str
    arguments: Any


class PeerAnswer(Struct, frozen=True):
    """What one head answered.

    Attributes:
        head_id: who answered.
        result: plain data of JSON.
        error: why there is no result; "" if there is one.
    """

    head_id: str
    result: Any = None
    error: str = ""
