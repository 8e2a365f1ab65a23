"""What an operator sees of the fleet and may do to it."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from vllm_omni_plugin.admin.replies import result_of
from vllm_omni_plugin.errors import CoordinatorUnavailableError, OmniError, ReplicaError
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_HOLD, PoolMember
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ManageReplica

Action = Literal["drain", "resume", "remove"]


class UnknownReplicaError(OmniError, LookupError):
    """No replica has the id. The message names those that exist."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica at one moment.

    Attributes:
        id: names it in this API: `<stage>.<replica>`.
        stage: its stage.
        replica: its id in that stage, as in the labels of metrics.
        status: `up`: takes requests; `draining`: attached, but gets no new ones; `down` or `error`: lost.
        held_back: why it gets no new requests: `admin`: an operator drains it; `drain`: its own server is told to end;
            `suspect`: its heartbeats are late.
        remote: whether its engine belongs to another process.
        input_addr: ZMQ address it takes requests on; empty before it has served, unless it is remote.
        output_addr: ZMQ address it gives outputs on; likewise.
        in_flight: unfinished requests it has: those of this head, and those of others as they were reported.
        dispatched: requests that this head ever sent to it.
        restarts: how often its engine was started again.
        since_seconds: seconds since it last began to serve or was lost; None before it has served.
    """

    id: str
    stage: int
    replica: int
    status: str
    held_back: list[str]
    remote: bool
    input_addr: str
    output_addr: str
    in_flight: int
    dispatched: int
    restarts: int
    since_seconds: float | None


class FleetAdmin:
    """Reports from tuples that are replaced, never changed, so without a lock; changes go to the orchestrator's loop.

    Args:
        orchestrator: has the replicas.
        fleet_calls: makes operators' calls.
        clock: monotonic seconds, the same as the orchestrator's.
    """

    def __init__(self, orchestrator: Orchestrator, fleet_calls: FleetCalls, clock: Callable[[], float]) -> None:
        self._orchestrator = orchestrator
        self._fleet_calls = fleet_calls
        self._clock = clock

    @property
    def refusal(self) -> CoordinatorUnavailableError | None:
        """Why calls to the engines as a whole are refused now; None if they are not."""
        return self._fleet_calls.refusal

    def replicas(self) -> list[ReplicaReport]:
        """All replicas, in order of stages and ids."""
        now = self._clock()
        return [_report(member, now) for member in self._members()]

    async def manage(self, replica: str, action: Action) -> None:
        """Drain a replica, undo that, or make it leave the fleet for good. Returns when that has begun, for all heads.

        A replica may be drained in any state, again and again.

        Args:
            replica: its `ReplicaReport.id`.

        Raises:
            UnknownReplicaError: there is none with this id.
            ReplicaError: it is in the wrong state for that.
            QueueClosedError: the server is about to end.
        """
        member = self._find(replica)
        if action == "resume" and ADMIN_HOLD not in member.held_back:
            raise ReplicaError(f"Replica {replica} is not drained by an operator ({_condition(member)}).")
        reply: Future[None] = Future()
        self._orchestrator.rpc_async_queue.force_put(ManageReplica(action, member.stage_id, member.replica_id, reply))
        await result_of(reply)

    def _members(self) -> Iterator[PoolMember]:
        for pool in self._orchestrator.stage_pools:
            yield from pool.members

    def _find(self, replica: str) -> PoolMember:
        members = {member.name: member for member in self._members()}
        if replica not in members:
            raise UnknownReplicaError(f"There is no replica {replica}. There are: {', '.join(members) or 'none'}.")
        return members[replica]


def _condition(member: PoolMember) -> str:
    """Status and holds in a few words."""
    holds = f", held back: {', '.join(sorted(member.held_back))}" if member.held_back else ""
    return f"it is {member.status.value}{holds}"


def _report(member: PoolMember, now: float) -> ReplicaReport:
    return ReplicaReport(
        id=member.name,
        stage=member.stage_id,
        replica=member.replica_id,
        status=member.status.value,
        held_back=sorted(member.held_back),
        remote=member.remote,
        input_addr=member.input_addr,
        output_addr=member.output_addr,
        in_flight=member.queue_length,
        dispatched=member.dispatched,
        restarts=member.restarts,
        since_seconds=now - member.changed_at if member.changed_at else None,
    )
