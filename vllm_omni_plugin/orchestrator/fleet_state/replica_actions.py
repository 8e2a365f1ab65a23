"""Draining, resuming and removing replicas, for the operator of this head or of another one."""

from contextlib import suppress

from vllm_omni_plugin.coordinator import ReplicaKey
from vllm_omni_plugin.coordinator.state.call_log import update_drained
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_CORDON, PoolMember


def apply_action(orchestrator: Orchestrator, action: str, member: PoolMember) -> None:
    """Drain, resume or remove a replica; see `ManageReplica`.

    Raises:
        ReplicaError: the replica cannot be removed.
    """
    if action == "drain":
        orchestrator.cordon(member, ADMIN_CORDON)
    elif action == "resume":
        orchestrator.uncordon(member, ADMIN_CORDON)
    else:
        assert member.leave is not None
        member.leave()


def apply_action_by_key(orchestrator: Orchestrator, action: str, key: ReplicaKey) -> None:
    """Apply an action of another head's operator to a replica of another process, if this head has that replica."""
    update_drained(action, key, orchestrator.drained)
    for pool in orchestrator.stage_pools:
        for member in pool.members:
            if member.remote and ReplicaKey.of(member) == key:
                # A head that is not attached cannot remove the replica. Another head has done so.
                with suppress(ReplicaError):
                    apply_action(orchestrator, action, member)
