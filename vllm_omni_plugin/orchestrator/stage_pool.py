"""The replicas of one stage: who serves, what each has in flight, and who gets the next request."""

import asyncio
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush

from vllm_omni_plugin.balancing import LoadBalancer, Task
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.errors import NoReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.request_state import OrchestratorRequestState
from vllm_omni_plugin.replicas.stage_client import StageClient

logger = init_logger(__name__)

_MAX_DESCRIBED = 8
"""Replicas that an error names one by one."""


@dataclass(slots=True, eq=False)
class PoolMember:
    """One replica in a pool; a policy sees it as a `balancing.ReplicaView`.

    Attributes:
        in_flight: requests charged to the replica, by engine-side id. The charge *is* the entry: inserted before the
            send and removed at the request's end, it makes the count exact and a second release impossible.
        dispatched: requests ever sent to it.
        restarts: how often its engine was started again.
        remote: whether its engine belongs to another process, which this head attaches to.
        held_back: why it gets no new requests although it could serve them; empty for one that serves. Replaced, never
            changed, so that other threads may read it.
        changed_at: monotonic seconds at which it last began to serve or was lost.
    """

    replica_id: int
    stage_id: int
    input_addr: str = ""
    output_addr: str = ""
    status: ReplicaStatus = ReplicaStatus.DOWN
    client: StageClient | None = None
    in_flight: dict[str, OrchestratorRequestState] = field(default_factory=dict)
    dispatched: int = 0
    restarts: int = 0
    remote: bool = False
    held_back: frozenset[str] = frozenset()
    changed_at: float = 0.0

    @property
    def queue_length(self) -> int:
        """Requests in flight, exact at this moment."""
        return len(self.in_flight)


class StagePool:
    """The replicas of one stage and the policy that chooses among those that serve.

    Members are added and change status rarely; a pick happens for every request and looks only at those that serve.

    Args:
        stage_id: stage of the pipeline.
        balancer: the policy; its `select` runs on the orchestrator's loop and must not block.

    Attributes:
        on_serving: called after every step that lets a replica take new requests.
    """

    def __init__(self, stage_id: int, balancer: LoadBalancer) -> None:
        self.stage_id = stage_id
        self.on_serving: Callable[[], None] = lambda: None
        self._balancer = balancer
        self._members: dict[int, PoolMember] = {}
        # All free ids are in the heap or not below the number. Some may have been taken by name since.
        self._freed: list[int] = []
        self._next_id = 0
        # Tuples that are replaced, never changed, so that other threads may read them.
        self._all: tuple[PoolMember, ...] = ()
        self._serving: tuple[PoolMember, ...] = ()
        self._policy_faults = 0
        self._awaiting_idle: dict[PoolMember, asyncio.Future[None]] = {}

    def __repr__(self) -> str:
        replicas = ", ".join(f"{m.replica_id}: {m.status.value} {m.queue_length}" for m in self.members)
        return f"<StagePool {self.stage_id} [{replicas}]>"

    @property
    def members(self) -> tuple[PoolMember, ...]:
        """All replicas, in order of their ids. Safe to read from any thread."""
        return self._all

    @property
    def serving(self) -> tuple[PoolMember, ...]:
        """The replicas that take new requests. Safe to read from any thread."""
        return self._serving

    def add(self, replica_id: int | None = None) -> PoolMember:
        """A new member, not serving yet, with this id or the lowest free one.

        Raises:
            ValueError: the id is taken.
        """
        if replica_id is None:
            replica_id = self._lowest_free_id()
        if replica_id in self._members:
            raise ValueError(f"stage {self.stage_id} has a replica {replica_id} already")
        member = PoolMember(replica_id, self.stage_id)
        self._members[replica_id] = member
        self._all = _with(self._all, member)
        return member

    def remove(self, member: PoolMember) -> None:
        """Forget a member and free its id. Nothing to do if it was removed before.

        Raises:
            ValueError: it has not been lost, so requests may be in flight on it.
        """
        if member.client is not None:
            raise ValueError(f"replica {member.replica_id} of stage {self.stage_id} still serves")
        if self._members.get(member.replica_id) is member:
            del self._members[member.replica_id]
            if member.replica_id < self._next_id:
                heappush(self._freed, member.replica_id)
            self._all = _without(self._all, member)

    def member(self, replica_id: int) -> PoolMember:
        """The replica with this id. Raises KeyError if there is none."""
        return self._members[replica_id]

    def serve(self, member: PoolMember, client: StageClient, input_addr: str, output_addr: str) -> None:
        """The replica takes requests from now on, over this client, unless it is held back."""
        member.client, member.input_addr, member.output_addr = client, input_addr, output_addr
        self._enter_service(member)

    def lose(self, member: PoolMember, status: ReplicaStatus) -> list[OrchestratorRequestState]:
        """The replica is gone or no longer trusted. Returns the requests that it was charged with, now released."""
        orphans = list(member.in_flight.values())
        member.in_flight.clear()
        member.client = None
        self._set_status(member, status)
        self._tell_if_idle(member)
        return orphans

    def hold_back(self, member: PoolMember, reason: str) -> None:
        """Give a replica no new requests, for a reason of the caller's; those in flight go on.

        Holds of different reasons add up, and one outlives the loss of the replica: who placed it releases it.
        """
        self._hold(member, member.held_back | {reason})

    def release_hold(self, member: PoolMember, reason: str) -> None:
        """Undo `hold_back` with the same reason. Nothing to do if there is no such hold."""
        self._hold(member, member.held_back - {reason})

    def when_idle(self, member: PoolMember) -> "asyncio.Future[None]":
        """Done as soon as nothing is in flight on a replica; it may get more unless it is held back."""
        waiter = self._awaiting_idle.get(member)
        if waiter is None or waiter.done():
            waiter = self._awaiting_idle[member] = asyncio.get_running_loop().create_future()
        self._tell_if_idle(member)
        return waiter

    def pick(self, task: Task, affinity_key: int | None = None) -> PoolMember:
        """The replica that shall run a request.

        Args:
            task: what the policy may know of the request.
            affinity_key: requests with the same key go to the same replica while membership stands.

        Raises:
            NoReplicaError: no replica serves.
        """
        serving = self._serving
        if not serving:
            raise self.unavailable()
        if affinity_key is not None:
            return serving[affinity_key % len(serving)]
        return self._select(task, serving)

    def unavailable(self, waited: float = 0.0) -> NoReplicaError:
        """The error of a request that finds no replica serving. Safe to call from any thread.

        Args:
            waited: seconds that the request has waited for one.
        """
        wait = f"; the request waited {waited:.0f} s for one" if waited else ""
        return NoReplicaError(
            f"No replica of stage {self.stage_id} can serve right now ({self._describe()}){wait}. "
            "Please try again later."
        )

    def charge(self, member: PoolMember, state: OrchestratorRequestState) -> None:
        """Count a request as in flight on a replica, before it is sent there."""
        member.in_flight[state.engine_request_id] = state
        member.dispatched += 1

    def release(self, state: OrchestratorRequestState) -> None:
        """The request is no longer in flight; nothing to do if it was released before."""
        member = self._members.get(state.replica_id) if state.replica_id is not None else None
        if member is not None and member.in_flight.pop(state.engine_request_id, None) is not None:
            self._tell_if_idle(member)

    def _select(self, task: Task, serving: tuple[PoolMember, ...]) -> PoolMember:
        """Ask the policy. A third party's may be wrong; that must not cost a request."""
        try:
            index = self._balancer.select(task, serving)
            if 0 <= index < len(serving):
                return serving[index]
            fault = f"returned {index} for {len(serving)} replicas"
        except Exception as error:
            fault = f"raised {error!r}"
        self._policy_faults += 1
        if self._policy_faults == 1:
            logger.error(
                "Load-balancing policy %s %s; such requests go to the shortest queue instead.",
                type(self._balancer).__name__,
                fault,
            )
        return min(serving, key=lambda m: m.queue_length)

    def _hold(self, member: PoolMember, reasons: frozenset[str]) -> None:
        member.held_back = reasons
        if member.client is not None:
            self._enter_service(member)

    def _enter_service(self, member: PoolMember) -> None:
        if member.held_back:
            self._set_status(member, ReplicaStatus.DRAINING)
            return
        self._set_status(member, ReplicaStatus.UP)
        self.on_serving()

    def _tell_if_idle(self, member: PoolMember) -> None:
        if self._awaiting_idle and not member.in_flight:
            waiter = self._awaiting_idle.pop(member, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(None)

    def _set_status(self, member: PoolMember, status: ReplicaStatus) -> None:
        served, serves = member.status is ReplicaStatus.UP, status is ReplicaStatus.UP
        member.status = status
        if served and not serves:
            self._serving = _without(self._serving, member)
        elif serves and not served:
            self._serving = _with(self._serving, member)

    def _lowest_free_id(self) -> int:
        while self._freed:
            replica_id = heappop(self._freed)
            if replica_id not in self._members:
                return replica_id
        while self._next_id in self._members:
            self._next_id += 1
        return self._next_id

    def _describe(self) -> str:
        if not self._all:
            return "it has none"
        if len(self._all) > _MAX_DESCRIBED:
            counts = Counter(m.status.value for m in self._all)
            return "of its replicas " + ", ".join(f"{count} are {status}" for status, count in sorted(counts.items()))
        return ", ".join(f"replica {m.replica_id} is {m.status.value}" for m in self._all)


def _place(members: tuple[PoolMember, ...], member: PoolMember) -> int:
    return bisect_left(members, member.replica_id, key=lambda m: m.replica_id)


def _with(members: tuple[PoolMember, ...], member: PoolMember) -> tuple[PoolMember, ...]:
    place = _place(members, member)
    return (*members[:place], member, *members[place:])


def _without(members: tuple[PoolMember, ...], member: PoolMember) -> tuple[PoolMember, ...]:
    place = _place(members, member)
    return (*members[:place], *members[place + 1 :])
