"""What operators want with single replicas, done by every head that has them: drain, resume, remove."""

from contextlib import suppress

from vllm_omni_plugin.coordinator import ReplicaKey
from vllm_omni_plugin.coordinator.state.call_log import note_drained
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.pool_member import ADMIN_HOLD, PoolMember


def manage(orchestrator: Orchestrator, action: str, member: PoolMember) -> None:
    """Do with a replica what an operator wants; see `ManageReplica`.

    Raises:
        ReplicaError: it cannot be told.
    """
    if action == "drain":
        orchestrator.hold_back(member, ADMIN_HOLD)
    elif action == "resume":
        orchestrator.release_hold(member, ADMIN_HOLD)
    else:
        assert member.leave is not None
        member.leave()


def manage_by_key(orchestrator: Orchestrator, action: str, key: ReplicaKey) -> None:
    """Do with a replica of another process what an operator wants who told another head. It need not be here."""
    note_drained(action, key, orchestrator.drained)
    for pool in orchestrator.stage_pools:
        for member in pool.members:
            if member.remote and ReplicaKey.of(member) == key:
                # Who is not attached to it has nobody to tell, and another head has told it.
                with suppress(ReplicaError):
                    manage(orchestrator, action, member)


def adopt_drained(orchestrator: Orchestrator, drained: set[ReplicaKey]) -> None:
    """These replicas of other processes, and no others, are drained."""
    orchestrator.drained.clear()
    orchestrator.drained.update(drained)
    for pool in orchestrator.stage_pools:
        for member in pool.members:
            if member.remote:
                manage(orchestrator, "drain" if ReplicaKey.of(member) in drained else "resume", member)
