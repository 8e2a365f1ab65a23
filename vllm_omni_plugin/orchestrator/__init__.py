"""The core of a head: requests as state machines, pools of replicas, and one event loop."""

from vllm_omni_plugin.orchestrator.attachment.remote_keeper import RemoteReplicaFactory
from vllm_omni_plugin.orchestrator.fleet_control import FleetControl
from vllm_omni_plugin.orchestrator.fleet_state.session_listener import SessionListener
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.request_owner import OrchestratorRequestState
from vllm_omni_plugin.orchestrator.requests.stage_run import RequestPhase, StageRun, StreamingInputState
from vllm_omni_plugin.orchestrator.thread import OrchestratorThread
from vllm_omni_plugin.vllm_api.engine_messages.request_building import build_engine_core_request_from_tokens

__all__ = [
    "FleetControl",
    "Orchestrator",
    "OrchestratorRequestState",
    "OrchestratorThread",
    "PoolMember",
    "RemoteReplicaFactory",
    "RequestPhase",
    "SessionListener",
    "StagePool",
    "StageRun",
    "StreamingInputState",
    "build_engine_core_request_from_tokens",
]
