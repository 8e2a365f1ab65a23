"""Settings of the replica servers of a node, from its command line."""

from collections.abc import Mapping
from dataclasses import dataclass

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.replicas.links.replica_ports import PortRange
from vllm_omni_plugin.vllm_api.codecs.message_filter import MessageFilter, reject


@dataclass(frozen=True)
class ReplicaIdentity:
    """What a replica keeps over its restarts: a number that is unique in the fleet, and the name of its place on its
    machine; -1 and "" if it has none."""

    number: int = -1
    host_slot: str = ""


NO_IDENTITY = ReplicaIdentity()


@dataclass(frozen=True)
class ServerSettings:
    """The same for all replicas of a node. Times are seconds.

    `host` is bound and announced, with any free ports unless there is a range. `coordinator_addr` is the ROUTER of the
    head's coordinator. Heartbeats and probes of an engine come every `heartbeat_interval`; a head or engine that does
    not answer for `heartbeat_timeout` is lost or hangs; a draining replica waits `drain_timeout` for its heads, all in
    seconds. `message_filter` returns a rejection for forbidden messages of heads. Without `secrets` there is no
    authentication. Heads must share the `fingerprint`, see
    `vllm_api.launch.model_fingerprint`.
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
