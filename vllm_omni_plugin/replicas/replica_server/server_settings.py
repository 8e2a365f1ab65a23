"""Settings of the replica servers of a node, from its command line."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.replicas.links.replica_ports import PortRange
from vllm_omni_plugin.vllm_api.codecs.message_filter import MessageFilter, reject


@dataclass(frozen=True)
class ReplicaIdentity:
    """What a replica keeps over its restarts.

    Attributes:
        number: unique in the fleet; -1: none.
        host_slot: names its place on its machine; "": none.
    """

    number: int = -1
    host_slot: str = ""


NO_IDENTITY = ReplicaIdentity()


@dataclass(frozen=True)
class ServerSettings:
    """The same for all replicas of a node. Times are seconds.

    Attributes:
        host: address to bind and announce.
        ports: range of ports to bind; None: any free ports.
        coordinator_addr: ROUTER address of the head's coordinator.
        heartbeat_interval: time between heartbeats, and between probes of an engine.
        heartbeat_timeout: a head or engine that does not answer for this time is lost or hangs.
        drain_timeout: how long a draining replica waits for its heads.
        secrets: the fleet's secrets; None: no authentication.
        message_filter: returns a rejection for forbidden messages of heads.
        max_message_bytes: limit of one message of a head.
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
    message_filter: MessageFilter = reject
    max_message_bytes: int = OmniConfig().max_message_bytes
