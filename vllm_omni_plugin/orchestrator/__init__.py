"""The head's core: requests as state machines, pools of replicas, one event loop that joins them."""

from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.remote_keeper import RemoteReplicaFactory
from vllm_omni_plugin.orchestrator.replica_list import ReplicaListWatcher
from vllm_omni_plugin.orchestrator.request_state import OrchestratorRequestState
from vllm_omni_plugin.orchestrator.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.orchestrator.stage_run import RequestPhase, StageRun, StreamingInputState
from vllm_omni_plugin.orchestrator.thread import OrchestratorThread
from vllm_omni_plugin.vllm_api.requests import build_engine_core_request_from_tokens

__all__ = [
    "Orchestrator",
    "OrchestratorRequestState",
    "OrchestratorThread",
    "PoolMember",
    "RemoteReplicaFactory",
    "ReplicaListWatcher",
    "RequestPhase",
    "StagePool",
    "StageRun",
    "StreamingInputState",
    "build_engine_core_request_from_tokens",
]
