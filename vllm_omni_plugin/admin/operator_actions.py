"""What operators do to a fleet: list, drain, resume and remove replicas, drain the head, reload its admission file."""

import asyncio
from collections.abc import Callable, Iterator, MutableSequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal

from vllm_omni_plugin.admission import load_admission
from vllm_omni_plugin.errors import ConfigError, CoordinatorUnavailableError, OmniError, ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator import Orchestrator, PoolMember
from vllm_omni_plugin.orchestrator.event_log import EventKind, EventLog
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON, CORDON_REASONS
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ManageReplica, ReplaceAdmission
from vllm_omni_plugin.orchestrator.requests.thread_queue import QueueClosedError, result_of

logger = init_logger(__name__)


Action = Literal["drain", "resume", "remove"]


class UnknownReplicaError(OmniError, LookupError):
    """No replica has this id. The message lists the existing ones."""


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica at one moment.

    Attributes:
        id: `<stage>.<replica>`.
        status: `up`: takes requests; `draining`: attached without new requests; `down` or `error`: lost;
            `other-generation`: only heads with its version and configuration use it.
        other_generation: how it differs from this head, and whether a head uses it; "" if it does not differ.
        cordons: why it gets no new requests: `admin`: an operator drains it; `drain`: its own server is ending;
            `late`: its server answers late; `asleep`: it was found paused or asleep; `weights`: weights were updated
            before its engine started; `stall`: it answered and computed nothing, and serves again once a request that
            is tried there gets a token.
        remote: whether its engine belongs to another process.
        machines: the addresses of its machines, the first one first, if it has several.
        input_addr, output_addr: ZMQ addresses; empty before it has served, unless it is remote.
        total_in_flight: unfinished requests of this head, and of other heads as reported.
        assigned: requests that this head has assigned to it so far.
        since_seconds: seconds since it last began to serve or was lost; None before it has served.
        held_back, in_flight, dispatched: `cordons`, `total_in_flight` and `assigned` under the names of version 0.1.
    """

    id: str
    stage: int
    replica: int
    status: str
    other_generation: str
    cordons: list[str]
    remote: bool
    machines: list[str]
    input_addr: str
    output_addr: str
    total_in_flight: int
    assigned: int
    restarts: int
    since_seconds: float | None
    held_back: list[str]
    in_flight: int
    dispatched: int


@dataclass(frozen=True)
class FleetAdmin:
    """Reads without a lock, since the tuples of replicas are immutable; sends changes to the orchestrator's loop."""

    orchestrator: Orchestrator
    fleet_calls: FleetCalls
    clock: Callable[[], float]

    @property
    def refusal(self) -> CoordinatorUnavailableError | None:
        """The error with which calls to the engines as a whole are refused now; None if they are accepted."""
        return self.fleet_calls.session.refusal

    def replicas(self) -> list[ReplicaReport]:
        now = self.clock()
        return [_report(member, now) for member in self._members()]

    async def manage(self, replica: str, action: Action) -> None:
        """Drain, resume or remove the replica with this `ReplicaReport.id`. Returns when all heads have begun that.

        Raises UnknownReplicaError, ReplicaError for its state, QueueClosedError if the server is about to end.
        """
        members = {member.name: member for member in self._members()}
        if replica not in members:
            raise UnknownReplicaError(f"There is no replica {replica}. There are: {', '.join(members) or 'none'}.")
        member = members[replica]
        if member.other_generation:
            raise ReplicaError(
                f"Replica {replica} is of another generation: ask a head of its kind, or end it at its node."
            )
        if action == "resume" and ADMIN_CORDON not in member.cordons:
            reasons = f", cordoned: {', '.join(sorted(member.cordons))}" if member.cordons else ""
            state = f"it is {member.state}{reasons}"
            raise ReplicaError(f"Replica {replica} is not drained by an operator ({state}).")
        reply: Future[None] = Future()
        self.orchestrator.rpc_async_queue.put(ManageReplica(action, member.stage_id, member.replica_id, reply))
        await result_of(reply)

    def _members(self) -> Iterator[PoolMember]:
        for pool in self.orchestrator.stage_pools:
            yield from pool.members


def _report(member: PoolMember, now: float) -> ReplicaReport:
    cordons, total_in_flight, assigned = sorted(member.cordons), member.queue_length, member.assignments
    return ReplicaReport(
        id=member.name,
        stage=member.stage_id,
        replica=member.replica_id,
        status=member.state,
        other_generation=member.other_generation,
        cordons=cordons,
        remote=member.remote,
        machines=list(member.machines),
        input_addr=member.input_addr,
        output_addr=member.output_addr,
        total_in_flight=total_in_flight,
        assigned=assigned,
        restarts=member.restarts,
        since_seconds=now - member.changed_at if member.changed_at else None,
        held_back=cordons,
        in_flight=total_in_flight,
        dispatched=assigned,
    )


DRAINING = "This server is drained by an operator and takes no new requests. Please send it to another one."
"""The message of requests that are refused meanwhile."""


class HeadDrain:
    """Whether an operator drains this head, with all API servers of its command. `begin` and `end` are idempotent."""

    def __init__(self, events: EventLog) -> None:
        self._events = events
        self._flag: MutableSequence[int] = [0]

    @property
    def active(self) -> bool:
        return bool(self._flag[0])

    def use_shared_flag(self, flag: MutableSequence[int]) -> None:
        """Use a flag that all API servers of one command share: 0 if the head is not drained."""
        self._flag = flag

    def begin(self) -> None:
        if not self.active:
            self._flag[0] = 1
            self._events.record(EventKind.DRAIN, CORDON_REASONS[ADMIN_CORDON][0])

    def end(self) -> None:
        if self.active:
            self._flag[0] = 0
            self._events.record(EventKind.RESUME, CORDON_REASONS[ADMIN_CORDON][1])


class AdmissionFile:
    """Reloads the file, here and by `reload_others` in other API servers. Lives on the server's event loop."""

    def __init__(self, path: str, orchestrator: Orchestrator, reload_others: Callable[[], None]) -> None:
        self._path = path
        self._orchestrator = orchestrator
        self._reload_others = reload_others
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    async def reload(self) -> list[str]:
        """Reload the file, here and in the other API servers; returns the changed values, one line each.

        Waiting requests keep their places. Raises ConfigError if the file has an error (the previous config then
        stays), QueueClosedError if the server is about to end.
        """
        changes = await self._load()
        self._reload_others()
        return changes

    def on_signal(self) -> None:
        """Reload the file, and log the result. The other API servers get the same signal."""
        # The reference keeps the task from being collected.
        task = asyncio.create_task(self._load_and_log(), name="omni-admission-file")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load_and_log(self) -> None:
        """After SIGHUP: a file with an error is logged, and the former config stays."""
        try:
            await self._load()
        except ConfigError as error:
            logger.error("The admission file has an error, and the previous config stays in use: %s", error)
        except QueueClosedError:
            pass

    async def _load(self) -> list[str]:
        # One load at a time, or an older file might be applied last.
        async with self._lock:
            # In a thread, because a large file takes seconds.
            config = await asyncio.to_thread(load_admission, self._path)
            reply: Future[list[str]] = Future()
            self._orchestrator.rpc_async_queue.put(ReplaceAdmission(config, reply))
            changes = await result_of(reply)
        if changes:
            logger.info("Admission uses the changed file %s: %s", self._path, "; ".join(changes))
        return changes
