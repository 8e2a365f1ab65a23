"""What a replica server is told by the command line of its node."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.replicas.links.replica_ports import PortRange
from vllm_omni_plugin.vllm_api.protocol.message_filter import MessageFilter, reject


@dataclass(frozen=True)
class ServerSettings:
    """The same for all replicas of a node. Times are seconds.

    Attributes:
        host: address to bind and announce.
        ports: those it may bind, or None for any that are free.
        coordinator_addr: ROUTER address of the head's coordinator.
        stage_id: stage the replicas serve.
        heartbeat_interval: between heartbeats, and between probes of an engine.
        heartbeat_timeout: silence after which a head has gone, or an engine hangs.
        drain_timeout: how long a leaving replica waits for its heads to finish.
        secrets: of the fleet, or None without authentication.
        message_filter: rejects messages of heads that may not reach an engine; None: all may.
        max_message_bytes: a head's largest message to an engine.
        fingerprint: the configuration that heads must share, see `vllm_api.launch.model_fingerprint`.
    """

    host: str
    ports: PortRange | None
    coordinator_addr: str
    stage_id: int
    heartbeat_interval: float
    heartbeat_timeout: float
    drain_timeout: float
    secrets: Secrets | None
    fingerprint: Mapping[str, str]
    message_filter: MessageFilter | None = reject
    max_message_bytes: int = OmniConfig().max_message_bytes
