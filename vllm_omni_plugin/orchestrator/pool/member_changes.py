"""Changes of who serves: replicas of other processes that come and go, and the administrator's wishes and questions."""

from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Protocol

from vllm_omni_plugin.coordinator import ReplicaKey
from vllm_omni_plugin.coordinator.state.call_log import note_drained
from vllm_omni_plugin.errors import CoordinatorAwayError, ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    Explain,
    ManageReplica,
    Membership,
    RegisterRemoteReplica,
    UnregisterRemoteReplica,
)

logger = init_logger(__name__)

ADMIN_HOLD = "admin"
"""The hold of a replica that the administrator drains."""


class ReplicaKeeper(Protocol):
    """Keeps replicas in their pools; `LocalReplicas` and `RemoteReplicas` in service."""

    def leave(self, member: PoolMember) -> None:
        """The replica ends, its requests move, and it does not come back. Returns at once."""


class RemoteKeeper(ReplicaKeeper, Protocol):
    """Attaches to replicas of other processes and lets them go. No method blocks."""

    def register(self, message: RegisterRemoteReplica) -> None: ...

    def unregister(self, message: UnregisterRemoteReplica) -> None: ...


class OtherHeads(Protocol):
    """The other heads of the fleet; `FleetCalls` in service."""

    @property
    def refusal(self) -> CoordinatorAwayError | None:
        """Why they cannot be told of anything now; None if they can, or there are none."""

    def managed(self, action: str, key: ReplicaKey, reply: "Future[None]") -> None:
        """Let them do the same with a replica of another process, then answer the operator."""


class Head(Protocol):
    """This head; `Orchestrator` in service.

    Attributes:
        local_replicas: keeps the replicas of this node; None without any.
        remote_replicas: keeps those of other processes; None in a head that nobody can join.
        drained: replicas of other processes that an administrator has drained, whether they are here or not.
        fleet_calls: the other heads; None in a head that nobody can join.
    """

    @property
    def stage_pools(self) -> Sequence[StagePool]: ...

    @property
    def local_replicas(self) -> ReplicaKeeper | None: ...

    @property
    def remote_replicas(self) -> RemoteKeeper | None: ...

    @property
    def drained(self) -> set[ReplicaKey]: ...

    @property
    def fleet_calls(self) -> OtherHeads | None: ...

    def release_hold(self, member: PoolMember, reason: str) -> None: ...

    def tell_front(self, item: Any) -> None: ...


def change_membership(head: Head, message: Membership) -> None:
    """Carry out one change."""
    if isinstance(message, ManageReplica):
        if message.reply.set_running_or_notify_cancel():
            _manage(head, message)
    elif head.remote_replicas is None:
        logger.error("A head without --omni-master-address cannot take remote replicas: %r", message)
    elif isinstance(message, RegisterRemoteReplica):
        head.remote_replicas.register(message)
    else:
        head.remote_replicas.unregister(message)


def manage_by_key(head: Head, action: str, key: ReplicaKey) -> None:
    """Do with a replica of another process what an administrator wants who told another head. It need not be here."""
    note_drained(action, key, head.drained)
    for pool in head.stage_pools:
        for member in pool.members:
            if member.remote and ReplicaKey.of(member) == key:
                # Who is not attached to it has nobody to tell, and another head has told it.
                with suppress(ReplicaError):
                    _carry_out(head, action, member)


def explain(message: Explain, stage_pools: Sequence[StagePool]) -> None:
    """Answer where a request would go."""
    if not message.reply.set_running_or_notify_cancel():
        return
    try:
        message.reply.set_result(stage_pools[message.stage_id].explain(message.task))
    except Exception as error:
        message.reply.set_exception(error)


def _manage(head: Head, message: ManageReplica) -> None:
    others = head.fleet_calls
    try:
        member = head.stage_pools[message.stage_id].member(message.replica_id)
        key = ReplicaKey.of(member)
        if member.remote and others is not None and others.refusal is not None:
            raise others.refusal
        _carry_out(head, message.action, member)
    except LookupError:
        message.reply.set_exception(
            ReplicaError(f"stage {message.stage_id} has no replica {message.replica_id}"),
        )
    except Exception as error:
        message.reply.set_exception(error)
    else:
        if member.remote:
            note_drained(message.action, key, head.drained)
        if member.remote and others is not None:
            others.managed(message.action, key, message.reply)
        else:
            message.reply.set_result(None)


def _carry_out(head: Head, action: str, member: PoolMember) -> None:
    if action == "drain":
        head.stage_pools[member.stage_id].hold_back(member, ADMIN_HOLD)
    elif action == "resume":
        head.release_hold(member, ADMIN_HOLD)
    else:
        keeper = head.remote_replicas if member.remote else head.local_replicas
        assert keeper is not None
        keeper.leave(member)
