"""Fleet membership: replicas register at a coordinator, heads follow its list. Needs neither vLLM nor torch."""

from vllm_omni_plugin.coordinator.client.announcing_client import OmniCoordClientForStage
from vllm_omni_plugin.coordinator.client.head_client import OmniCoordClientForHead
from vllm_omni_plugin.coordinator.client.head_query import HeadQueryResult, query_head
from vllm_omni_plugin.coordinator.client.hub_client import OmniCoordClientForHub
from vllm_omni_plugin.coordinator.process.runtime import OmniCoordinatorRuntime
from vllm_omni_plugin.coordinator.protocol.control_messages import (
    ReplicaEvent,
    ReplicaInfo,
    ReplicaKey,
    ReplicaList,
    ReplicaStatus,
    decode_event,
    decode_replica_list,
    encode_event,
    encode_replica_list,
)
from vllm_omni_plugin.coordinator.protocol.head_messages import (
    MAX_REPORTED_ADAPTERS,
    FullList,
    HeadInfo,
    HeadLeft,
    HeadWork,
    ListDelta,
    ReplicaWork,
    SessionEvent,
    SessionLost,
    Welcome,
    engine_key,
    generation_of,
)
from vllm_omni_plugin.coordinator.server.service import OmniCoordinator

__all__ = [
    "MAX_REPORTED_ADAPTERS",
    "FullList",
    "HeadInfo",
    "HeadLeft",
    "HeadQueryResult",
    "HeadWork",
    "ListDelta",
    "OmniCoordClientForHead",
    "OmniCoordClientForHub",
    "OmniCoordClientForStage",
    "OmniCoordinator",
    "OmniCoordinatorRuntime",
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
    "generation_of",
    "query_head",
]
