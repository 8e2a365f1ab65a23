"""Who is in the fleet: replicas report to a coordinator, heads follow its list. Needs neither vLLM nor torch."""

from vllm_omni_plugin.coordinator.head_client import OmniCoordClientForHead
from vllm_omni_plugin.coordinator.head_listener import HeadListener
from vllm_omni_plugin.coordinator.head_messages import PeerAnswer, PeerCall, ReplicaWork, engine_key
from vllm_omni_plugin.coordinator.hub_client import OmniCoordClientForHub
from vllm_omni_plugin.coordinator.membership import Change, ChangeKind, Liveness, Member, MembershipTable, ReplicaKey
from vllm_omni_plugin.coordinator.messages import ReplicaEvent, ReplicaInfo, ReplicaList, ReplicaStatus
from vllm_omni_plugin.coordinator.pending_calls import NoSeatError
from vllm_omni_plugin.coordinator.runtime import OmniCoordinatorRuntime
from vllm_omni_plugin.coordinator.service import OmniCoordinator
from vllm_omni_plugin.coordinator.stage_client import OmniCoordClientForStage
from vllm_omni_plugin.coordinator.wire import decode_event, decode_replica_list, encode_event, encode_replica_list

__all__ = [
    "Change",
    "ChangeKind",
    "HeadListener",
    "Liveness",
    "Member",
    "MembershipTable",
    "NoSeatError",
    "OmniCoordClientForHead",
    "OmniCoordClientForHub",
    "OmniCoordClientForStage",
    "OmniCoordinator",
    "OmniCoordinatorRuntime",
    "PeerAnswer",
    "PeerCall",
    "ReplicaEvent",
    "ReplicaInfo",
    "ReplicaKey",
    "ReplicaList",
    "ReplicaStatus",
    "ReplicaWork",
    "decode_event",
    "decode_replica_list",
    "encode_event",
    "encode_replica_list",
    "engine_key",
]
