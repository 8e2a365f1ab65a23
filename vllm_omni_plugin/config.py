"""The head's options, parsed once at the edge and immutable from there on."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Self

from vllm_omni_plugin.errors import ConfigError

DEFAULT_LB_POLICY = "least-queue-length"
DEFAULT_DP_SIZE_LOCAL = 1
DEFAULT_MIGRATION_LIMIT = 3


@dataclass(frozen=True)
class OmniConfig:
    """What the `--omni-*` flags of a head say.

    It travels as plain data inside vLLM's `additional_config`, which vLLM hashes as JSON and hands to every engine
    process: hence no secret may ever be a field of it.

    Attributes:
        lb_policy: name of a load-balancing policy, or `package.module:Class` of a third party's.
        dp_size_local: replicas of the model that the head runs itself.
        migration_limit: how often one request may move to another replica before it fails.
    """

    lb_policy: str = DEFAULT_LB_POLICY
    dp_size_local: int = DEFAULT_DP_SIZE_LOCAL
    migration_limit: int = DEFAULT_MIGRATION_LIMIT

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
