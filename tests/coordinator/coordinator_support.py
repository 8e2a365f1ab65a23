"""What the coordinator's tests share."""

import time
from collections.abc import Callable

from vllm_omni_plugin.coordinator import ReplicaEvent, ReplicaList, ReplicaStatus

ANY = "tcp://127.0.0.1:*"


def make_event(
    name: str = "a",
    *,
    stage_id: int = 0,
    status: ReplicaStatus = ReplicaStatus.UP,
    queue_length: int = 0,
    incarnation: int = 0,
    sequence: int = 0,
) -> ReplicaEvent:
    """Return an update of the replica called ``name``."""
    return ReplicaEvent(
        input_addr=f"tcp://{name}:1",
        output_addr=f"tcp://{name}:2",
        stage_id=stage_id,
        event_type="update",
        status=status,
        queue_length=queue_length,
        incarnation=incarnation,
        sequence=sequence,
    )


def names(replicas: ReplicaList) -> list[str]:
    """Return the names of the replicas that take work, sorted."""
    return sorted(replica.input_addr.removeprefix("tcp://").removesuffix(":1") for replica in replicas.replicas)


def eventually(condition: Callable[[], object], within: float = 20.0) -> None:
    """Return once ``condition`` holds; fail if it does not within that many seconds."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


class ManualClock:
    """Seconds that pass only when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
