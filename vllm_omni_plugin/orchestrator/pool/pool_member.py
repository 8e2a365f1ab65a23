"""One replica as its pool knows it."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

from vllm_omni_plugin.balancing import ReplicaLoad
from vllm_omni_plugin.coordinator import ReplicaStatus, engine_key
from vllm_omni_plugin.coordinator.protocol.fleet_state import NOTHING_TOLD, ReplicaState
from vllm_omni_plugin.orchestrator.pool.progress import Progress
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun
from vllm_omni_plugin.replicas.links.engine_client import EngineClient

ADMIN_CORDON = "admin"
"""An operator drains the replica."""
DRAIN_CORDON = "drain"
"""The replica's server shuts down."""
LATE_CORDON = "late"
"""The replica's server answers late."""
WEIGHTS_CORDON = "weights"
"""The weights were updated at run time, and the replica's engine has not got them."""
ASLEEP_CORDON = "asleep"
"""The replica was paused or asleep when this head found it, and no call has said since whether it should be."""
STALL_CORDON = "stall"
"""The replica answered and computed nothing; a request is tried there before it serves again."""
CORDON_REASONS = {
    ADMIN_CORDON: ("an operator drains it", "an operator resumes it"),
    DRAIN_CORDON: ("its server shuts down", "its server is back"),
    ASLEEP_CORDON: ("it was found paused or asleep", "an operator pauses or resumes the fleet"),
    LATE_CORDON: ("its server answers late", "its server answers in time again"),
    WEIGHTS_CORDON: ("it waits for the next complete weight update", "it has the updated weights"),
    STALL_CORDON: ("it has stalled", "its engine computes again"),
}
"""Why a replica is cordoned and uncordoned, in words."""
OTHER_GENERATION = "other-generation"
"""What users see instead of the status of a replica that only heads of another generation use."""
NO_HEAD = "no head of its kind"
"""At the end of the differences of such a replica while none uses it; the probe of the chart's nodes looks for it."""

_STAGE_STRIDE = 10_000
"""More than the replicas that one head can have sockets for."""


def engine_index(stage_id: int, replica_id: int) -> int:
    """A replica's index among all replicas; in stage 0 it is the replica id."""
    return _STAGE_STRIDE * stage_id + replica_id


def stage_and_replica(index: int) -> tuple[int, int]:
    """Undo `engine_index`."""
    return divmod(index, _STAGE_STRIDE)


@dataclass(slots=True, eq=False)
class PoolMember:
    """One replica in a pool; a policy sees it as a `balancing.ReplicaView`.

    Attributes:
        in_flight: requests charged to the replica, by engine-side id. The charge *is* the entry: inserted before the
            send and removed at the request's end, it makes the count exact and a second release impossible.
        queue_length: unfinished requests as the ledger has them: this head's, which are exact, and those of other heads
            as they were reported. Only the pool sets it.
        place: its index among the serving replicas; None: it does not serve.
        stalls: how often its engine answered and computed nothing, see `StallWatch`.
        adapter_loads: how often a request came whose LoRA adapter its engine probably had to load.
        bad_output_at: monotonic seconds at which it last sent an output that the front end could not process.
        request_to_try: what it gets after a stall, before it serves again; None: nothing.
        remote: whether its engine belongs to another process, which this head attaches to.
        machines: the addresses of its machines, if it has several.
        incarnation: the incarnation that this head is or was attached to, of a remote replica.
        cordons: why it gets no new requests; JSON has them. Replaced, since other threads read it.
        other_generation: how its configuration differs from this head's, in words, and whether a head uses it; "": it
            does not differ. It is never attached to.
        changed_at: monotonic seconds at which the replica last began to serve or was lost.
        leave: removes the replica for good, moves its requests and frees its id. Returns at once; raises
            `ReplicaError` if the replica cannot be reached. Set by the owner of the replica.
        told: what its engine was told of the fleet's state. `report_told` tells a remote replica's server, if it can.
        is_busy: whether any head has a call open that may block its engine for long, as its server says.
        idle: done as soon as nothing is in flight; None if nothing waits for that.
        engine_index, name: in vLLM's metrics and logs; for users, `<stage>.<replica>`.
    """

    replica_id: int
    stage_id: int
    input_addr: str = ""
    output_addr: str = ""
    status: ReplicaStatus = ReplicaStatus.DOWN
    client: EngineClient | None = None
    in_flight: dict[str, StageRun] = field(default_factory=dict)
    ledger: LoadLedger = field(default_factory=LoadLedger)
    queue_length: int = 0
    place: int | None = None
    progress: Progress = field(default_factory=Progress)
    assignments: int = 0
    restarts: int = 0
    stalls: int = 0
    adapter_loads: int = 0
    bad_output_at: float = -inf
    request_to_try: Any = None
    remote: bool = False
    machines: tuple[str, ...] = ()
    incarnation: int = 0
    cordons: frozenset[str] = frozenset()
    other_generation: str = ""
    changed_at: float = 0.0
    leave: Callable[[], None] | None = None
    told: ReplicaState = NOTHING_TOLD
    report_told: Callable[[ReplicaState], None] | None = None
    is_busy: bool = False
    idle: "asyncio.Future[None] | None" = None
    engine_index: int = field(init=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.engine_index = engine_index(self.stage_id, self.replica_id)
        self.name = f"{self.stage_id}.{self.replica_id}"

    @property
    def state(self) -> str:
        """What users see of it."""
        return OTHER_GENERATION if self.other_generation else self.status.value

    @property
    def load(self) -> ReplicaLoad:
        """The load now. For the orchestrator's thread; others use `ledger.uncached_load`."""
        return self.ledger.load

    @property
    def counts(self) -> tuple[int, int, int, int]:
        """What the metrics count of it: assignments, restarts, stalls and loads of adapters."""
        return self.assignments, self.restarts, self.stalls, self.adapter_loads

    @property
    def starts_with_head(self) -> bool:
        """Whether vLLM's server waits for the replica at its start."""
        return not self.remote and not self.restarts

    @property
    def machine(self) -> str:
        """The address of a remote replica's machine; "" for a local replica."""
        return self.input_addr.rpartition(":")[0] if self.remote else ""

    def notify_if_idle(self) -> None:
        if self.idle is not None and not self.in_flight and not self.idle.done():
            self.idle.set_result(None)

    @property
    def engine_key(self) -> int:
        """A key of the replica and its incarnation, the same at all heads."""
        return engine_key(self.stage_id, self.input_addr, self.output_addr, self.incarnation)
