"""Who is in the fleet: replicas report to a coordinator, heads follow its list. Needs neither vLLM nor torch."""

from vllm_omni_plugin.coordinator.head_client import OmniCoordClientForHead
from vllm_omni_plugin.coordinator.head_messages import (
    HeadLeft,
    PeerWork,
    ReplicaWork,
    SessionLost,
    Welcome,
    engine_key,
)
from vllm_omni_plugin.coordinator.head_session import SessionEvent
from vllm_omni_plugin.coordinator.hub_client import OmniCoordClientForHub
from vllm_omni_plugin.coordinator.membership import Change, ChangeKind, Liveness, Member, MembershipTable
from vllm_omni_plugin.coordinator.messages import ReplicaEvent, ReplicaInfo, ReplicaKey, ReplicaList, ReplicaStatus
from vllm_omni_plugin.coordinator.runtime import OmniCoordinatorRuntime
from vllm_omni_plugin.coordinator.service import OmniCoordinator
from vllm_omni_plugin.coordinator.stage_client import OmniCoordClientForStage
from vllm_omni_plugin.coordinator.wire import decode_event, decode_replica_list, encode_event, encode_replica_list

__all__ = [
    "Change",
    "ChangeKind",
    "HeadLeft",
    "Liveness",
    "Member",
    "MembershipTable",
    "OmniCoordClientForHead",
    "OmniCoordClientForHub",
    "OmniCoordClientForStage",
    "OmniCoordinator",
    "OmniCoordinatorRuntime",
    "PeerWork",
    "ReplicaEvent",
    "ReplicaInfo",
    "ReplicaKey",
    "ReplicaList",
    "ReplicaStatus",
    "ReplicaWork",
    "SessionEvent",
    "SessionLost",
    "Welcome",
    "decode_event",
    "decode_replica_list",
    "encode_event",
    "encode_replica_list",
    "engine_key",
]
