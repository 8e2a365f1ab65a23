"""A replica as a policy sees it."""

from dataclasses import dataclass

from vllm_omni_plugin.balancing import ReplicaLoad


@dataclass(frozen=True)
class FakeReplica:
    """Satisfies `ReplicaView`."""

    input_addr: str
    output_addr: str = "tcp://head:1"
    stage_id: int = 0
    queue_length: int = 0
    load: ReplicaLoad | None = None


def with_queues(*queue_lengths: int) -> list[FakeReplica]:
    return [FakeReplica(f"tcp://replica:{port}", queue_length=length) for port, length in enumerate(queue_lengths)]


def with_loads(*loads: ReplicaLoad) -> list[FakeReplica]:
    return [
        FakeReplica(f"tcp://replica:{port}", queue_length=load.requests, load=load) for port, load in enumerate(loads)
    ]
