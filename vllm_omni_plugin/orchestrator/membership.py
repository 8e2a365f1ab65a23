"""Changes of who serves: replicas of other processes that come and go, and the administrator's wishes and questions."""

from collections.abc import Sequence
from typing import Protocol

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.messages import (
    Explain,
    ManageReplica,
    Membership,
    RegisterRemoteReplica,
    UnregisterRemoteReplica,
)
from vllm_omni_plugin.orchestrator.stage_pool import PoolMember, StagePool

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


def change_membership(
    message: Membership,
    stage_pools: Sequence[StagePool],
    local_replicas: ReplicaKeeper | None,
    remote_replicas: RemoteKeeper | None,
) -> None:
    """Carry out one change. What is wrong with one replica does not stop the service of the others.

    Args:
        message: the change.
        stage_pools: the pools by stage.
        local_replicas: keeps the replicas of this node, None without any.
        remote_replicas: keeps those of other processes, None in a head that nobody can join.
    """
    try:
        if isinstance(message, ManageReplica):
            if message.reply.set_running_or_notify_cancel():
                _manage(message, stage_pools, local_replicas, remote_replicas)
        elif remote_replicas is None:
            logger.error("A head without --omni-master-address cannot take remote replicas: %r", message)
        elif isinstance(message, RegisterRemoteReplica):
            remote_replicas.register(message)
        else:
            remote_replicas.unregister(message)
    except Exception:
        logger.exception("A change of membership could not be made: %r", message)


def explain(message: Explain, stage_pools: Sequence[StagePool]) -> None:
    """Answer where a request would go."""
    if not message.reply.set_running_or_notify_cancel():
        return
    try:
        message.reply.set_result(stage_pools[message.stage_id].explain(message.task))
    except Exception as error:
        message.reply.set_exception(error)


def _manage(
    message: ManageReplica,
    stage_pools: Sequence[StagePool],
    local_replicas: ReplicaKeeper | None,
    remote_replicas: RemoteKeeper | None,
) -> None:
    try:
        pool = stage_pools[message.stage_id]
        member = pool.member(message.replica_id)
        if message.action == "drain":
            pool.hold_back(member, ADMIN_HOLD)
        elif message.action == "resume":
            pool.release_hold(member, ADMIN_HOLD)
        else:
            keeper = remote_replicas if member.remote else local_replicas
            assert keeper is not None
            keeper.leave(member)
    except LookupError:
        message.reply.set_exception(
            ReplicaError(f"stage {message.stage_id} has no replica {message.replica_id}"),
        )
    except Exception as error:
        message.reply.set_exception(error)
    else:
        message.reply.set_result(None)
