"""One replica as its pool knows it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_omni_plugin.balancing import ReplicaLoad
from vllm_omni_plugin.coordinator import ReplicaStatus, engine_key
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun
from vllm_omni_plugin.replicas.client.stage_client import StageClient

ADMIN_HOLD = "admin"
"""The hold of a replica that the administrator drains."""
DRAIN_HOLD = "drain"
"""The hold of a replica whose server drains."""
SUSPECT_HOLD = "suspect"
"""The hold of a replica that the coordinator has not heard of for long."""
HOLDS = {
    ADMIN_HOLD: ("an operator drains it", "an operator resumes it"),
    DRAIN_HOLD: ("its server is told to end", "its server is there again"),
    SUSPECT_HOLD: ("its heartbeats are late", "its heartbeats are there again"),
}
"""In words why each is placed and why it is released."""

_STAGE_STRIDE = 10_000
"""More replicas than one head has sockets for."""


def engine_index(stage_id: int, replica_id: int) -> int:
    """An index that no replica of another stage has; those of stage 0 keep their ids."""
    return _STAGE_STRIDE * stage_id + replica_id


def stage_and_replica(index: int) -> tuple[int, int]:
    """The ids of the stage and the replica that have this index."""
    return divmod(index, _STAGE_STRIDE)


@dataclass(slots=True, eq=False)
class PoolMember:
    """One replica in a pool; a policy sees it as a `balancing.ReplicaView`.

    Attributes:
        in_flight: requests charged to the replica, by engine-side id. The charge *is* the entry: inserted before the
            send and removed at the request's end, it makes the count exact and a second release impossible.
        ledger: what they weigh, and what the engine and other heads report.
        dispatched: requests ever sent to it.
        restarts: how often its engine was started again.
        remote: whether its engine belongs to another process, which this head attaches to.
        incarnation: of a remote one, the incarnation that this head is or was attached to.
        held_back: why it gets no new requests although it could serve them; empty for one that serves. Replaced, never
            changed, so that other threads may read it.
        changed_at: monotonic seconds at which it last began to serve or was lost.
        leave: ends it for good, moves its requests and frees its id; returns at once, or raises `ReplicaError` if it
            cannot be told. Set by who keeps it.
        idle: done as soon as nothing is in flight; None if nobody has asked.
        engine_index: the number under which vLLM's metrics and logs know it.
        name: what users call it, `<stage>.<replica>`.
        machine: the same for replicas that this head reaches at one address.
    """

    replica_id: int
    stage_id: int
    input_addr: str = ""
    output_addr: str = ""
    status: ReplicaStatus = ReplicaStatus.DOWN
    client: StageClient | None = None
    in_flight: dict[str, StageRun] = field(default_factory=dict)
    ledger: LoadLedger = field(default_factory=LoadLedger)
    dispatched: int = 0
    restarts: int = 0
    remote: bool = False
    incarnation: int = 0
    held_back: frozenset[str] = frozenset()
    changed_at: float = 0.0
    leave: Callable[[], None] | None = None
    idle: "asyncio.Future[None] | None" = None
    engine_index: int = field(init=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.engine_index = engine_index(self.stage_id, self.replica_id)
        self.name = f"{self.stage_id}.{self.replica_id}"

    @property
    def queue_length(self) -> int:
        """Unfinished requests: this head's, exact at this moment, and those of others as they were reported."""
        return self.ledger.requests

    @property
    def load(self) -> ReplicaLoad:
        """What it has to do at this moment. For the loop's thread; others ask its ledger for `uncached_load`."""
        return self.ledger.load

    @property
    def machine(self) -> str:
        """As above."""
        return self.input_addr.rpartition(":")[0] if self.remote else ""

    def notify_if_idle(self) -> None:
        """Something has left the replica."""
        if self.idle is not None and not self.in_flight and not self.idle.done():
            self.idle.set_result(None)

    @property
    def engine_key(self) -> int:
        """By what all heads name the start of the replica that this head is or was attached to."""
        return engine_key(self.stage_id, self.input_addr, self.output_addr, self.incarnation)
