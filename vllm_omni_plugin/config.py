"""The options of a head or a headless node, parsed once at the edge and immutable from there on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from vllm_omni_plugin.errors import ConfigError

ADMIN_KEY_FLAG = "--omni-admin-key-file"
FLEET_ENGINE = "VLLM_OMNI_FLEET_ENGINE"
"""Environment variable that marks the engines of a fleet and their workers, which have none of the flags. It holds the
path of the file where an engine says how one of its workers ended."""


@dataclass(frozen=True)
class OmniConfig:
    """What the `--omni-*` flags say.

    It travels as plain data inside vLLM's `additional_config`, which vLLM hashes as JSON and shows to whoever asks
    for its configuration: hence no secret may ever be a field of it, only the path of one.

    Attributes:
        pipeline: path of the file of a pipeline's stages; None: the replicas of one model.
        lb_policy: name of a load-balancing policy, or `package.module:Class` of a third party's.
        lb_config: options of that policy, arguments of its constructor; None: all as they are by default.
        dp_size_local: replicas of the model that this process runs itself.
        migration_limit: how often one request may move to another replica before it fails.
        replica_wait: seconds that requests wait while no replica can serve.
        join: whether this head shares the replicas of a fleet that has a coordinator already, and runs none itself.
        master_address: where the head's coordinator listens; None: the fleet is this process alone.
        master_port: its port.
        stage_id: stage that a headless node's replicas serve.
        replica_address: address that replica servers bind and announce; None: on a headless node the one it reaches the
            head from, on a head with several API servers the coordinator's.
        replica_ports: range of ports for that, "FIRST-LAST"; None: any free ones.
        heartbeat_interval: seconds between the signs of life of a replica, an engine or a head.
        heartbeat_timeout: seconds of silence after which any of them is not relied on any more.
        secret_file: file with the secret that opens the links between nodes.
        max_message_size: MiB that a message between a head and a replica of another process may have at most.
        insecure: links between nodes are open to anybody.
        any_vllm: go on with a version of vLLM that this package is not made for.
        admin_key_file: file with the keys of those who may change the fleet over HTTP; None: this machine alone may.
        drain_timeout: seconds that running requests have when a node or a head is told to end.
        join_timeout: seconds in which a headless node must find the head for the first time; 0: no limit.
    """

    pipeline: str | None = None
    lb_policy: str = "prefix"
    lb_config: dict[str, Any] | None = None
    dp_size_local: int = 1
    migration_limit: int = 3
    replica_wait: float = 60.0
    join: bool = False
    master_address: str | None = None
    master_port: int | None = None
    stage_id: int = 0
    replica_address: str | None = None
    replica_ports: str | None = None
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 10.0
    secret_file: str | None = None
    max_message_size: int = 512
    insecure: bool = False
    any_vllm: bool = False
    admin_key_file: str | None = None
    drain_timeout: float = 300.0
    join_timeout: float = 300.0

    @property
    def is_open(self) -> bool:
        """Whether replicas of other processes take part."""
        return self.master_address is not None

    @property
    def max_message_bytes(self) -> int:
        """`max_message_size` in bytes."""
        return self.max_message_size * 2**20

    def to_plain(self) -> dict[str, Any]:
        """The same as JSON-compatible data."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Self:
        """Read what `to_plain` wrote.

        Raises:
            ConfigError: for a key that is no option of this version.
        """
        unknown = sorted(set(plain) - {field.name for field in fields(cls)})
        if unknown:
            raise ConfigError(f"unknown vllm-omni-plugin option(s): {', '.join(unknown)}")
        return cls(**plain)
