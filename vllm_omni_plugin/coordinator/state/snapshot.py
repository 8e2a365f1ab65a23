"""The table as heads see it."""

from collections.abc import Iterable

from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaInfo, ReplicaKey, ReplicaList
from vllm_omni_plugin.coordinator.state.membership_table import Member
from vllm_omni_plugin.coordinator.state.numbering import Numbering


def replica_list(members: Iterable[Member], numbering: Numbering, now: float, wall_now: float) -> ReplicaList:
    """Return the list to publish, sorted by `ReplicaKey` so that it keeps its order from one time to the next.

    ``now`` and ``wall_now`` are one moment in monotonic and in wall-clock seconds.
    """
    replicas: list[ReplicaInfo] = []
    no_new_work: list[ReplicaInfo] = []
    for member in sorted(members, key=lambda member: ReplicaKey.of(member.event)):
        if member.takes_new_work:
            replicas.append(row_of(member, numbering, wall_now - now))
        elif member.may_finish_work:
            no_new_work.append(row_of(member, numbering, wall_now - now))
    return ReplicaList(replicas=replicas, timestamp=wall_now, no_new_work=no_new_work)


def row_of(member: Member, numbering: Numbering, wall_offset: float) -> ReplicaInfo:
    """Return a member's row. ``wall_offset``: what makes monotonic seconds into seconds since the epoch."""
    event = member.event
    return ReplicaInfo(
        input_addr=event.input_addr,
        output_addr=event.output_addr,
        stage_id=event.stage_id,
        status=event.status,
        queue_length=event.queue_length,
        last_heartbeat=max(0.0, member.heard_at + wall_offset),
        registered_at=max(0.0, member.registered_at + wall_offset),
        incarnation=event.incarnation,
        control_addr=event.control_addr,
        replica_id=numbering.number_of(ReplicaKey.of(event)),
    )
