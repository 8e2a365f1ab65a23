"""The options of a head or a headless node and the flags that set them, parsed once at the edge."""

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any, Self

from vllm_omni_plugin.errors import ConfigError

ADMIN_KEY_FLAG = "--omni-admin-key-file"
FLEET_ENGINE = "VLLM_OMNI_FLEET_ENGINE"
"""Environment variable that marks the engines of a fleet and their workers, which have none of the flags. It holds the
path of the file where an engine says how one of its workers ended."""
NO_MODEL = "<named by --omni-pipeline>"
"""Stands for the model on a command line without one, until the pipeline's file has been read."""

_MAX_STAGE_ID = 1023
_MAX_PORT = 65535
_MAX_MESSAGE_MIB = 2**20
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Side(Enum):
    """Where a flag has a meaning."""

    HEAD = "head"
    HEADLESS = "headless"
    BOTH = "both"


@dataclass(frozen=True)
class Flag:
    """One flag.

    Attributes:
        field: the field of `OmniConfig` that it sets.
        default: of that field.
        side: where it has a meaning.
        help: its text.
        metavar: stands for its value in the text; "" if it takes none.
        type: reads its value; None: as it is.
        aliases: further names, which it has where nobody else has them.
    """

    field: str
    default: Any
    side: Side
    help: str
    metavar: str = ""
    type: Callable[[str], Any] | None = None
    aliases: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The flag."""
        return f"--{self.destination.replace('_', '-')}"

    @property
    def destination(self) -> str:
        """Where argparse leaves its value; None if it was not given."""
        return f"omni_{self.field}"

    @property
    def takes_value(self) -> bool:
        """Whether it is followed by a value."""
        return bool(self.metavar)

    def help_with_default(self) -> str:
        """The text for `--help`. Its end prints nothing, but keeps vLLM's formatter from adding our default of None."""
        shown = "" if self.default is None or not self.takes_value else f" (default: {self.default})"
        return f"{self.help}{shown}%(default).0s"


def whole(minimum: int, maximum: float = math.inf, reason: str = "") -> Callable[[str], int]:
    """A type for whole numbers from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        _require_range(value, minimum, maximum, reason)
        return value

    return parse


def seconds(text: str) -> float:
    """A type for durations of zero or more seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    _require_range(value, 0, math.inf, "a time cannot be negative")
    return value


def header_name(text: str) -> str:
    """A type for names of HTTP headers."""
    if not _HEADER_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of an HTTP header")
    return text


def json_object(text: str) -> dict[str, Any]:
    """A type for objects in JSON."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not an object in JSON, such as {{"option": 1}}')
    return value


def _require_range(value: float, minimum: float, maximum: float, reason: str) -> None:
    if value < minimum:
        raise argparse.ArgumentTypeError(f"{value} is below {minimum}{reason and ': ' + reason}")
    if value > maximum:
        raise argparse.ArgumentTypeError(f"{value} is above {maximum}{reason and ': ' + reason}")


def _flag(default: Any, *about: Any, **more: Any) -> Any:
    """A field of `OmniConfig` with its flag; the further arguments are those of `Flag`."""
    return field(default=default, metadata={"flag": lambda name: Flag(name, default, *about, **more)})


@dataclass(frozen=True)
class OmniConfig:
    """What the `--omni-*` flags say: each field is set by the flag of its name, whose help says what it means.

    It travels as plain data inside vLLM's `additional_config`, which vLLM hashes as JSON and shows to whoever asks
    for its configuration: hence no secret may ever be a field of it, only the path of one.
    """

    pipeline: str | None = _flag(
        None,
        Side.BOTH,
        "YAML file of stages that requests run through, each with replicas of its own; it says what MODEL and the "
        "arguments of engines, replicas and policies are elsewhere. With --headless: the file of --omni-stage-id.",
        "FILE",
        os.path.abspath,
    )
    lb_policy: str = _flag(
        "prefix",
        Side.HEAD,
        "How requests are balanced over the replicas: random, round-robin, least-queue-length, power-of-two, "
        "least-tokens, session, prefix, kv-aware, cost-aware, the name of an installed policy, or "
        "package.module:Class.",
        "POLICY",
    )
    lb_config: dict[str, Any] | None = _flag(  # noqa: RUF009 - it makes a `field`
        None,
        Side.HEAD,
        'Options of the policy as an object in JSON, such as {"decode_weight": 0.2} for least-tokens. Default: none.',
        "JSON",
        json_object,
    )
    dp_size_local: int = _flag(
        1,
        Side.BOTH,
        "Replicas of the model that this process runs itself. A head may have none of its own (0).",
        "N",
        whole(0, reason="there cannot be fewer replicas than none"),
    )
    master_address: str | None = _flag(
        None,
        Side.BOTH,
        "On the head: address on which replicas of other nodes join, which opens the fleet. With --headless: the "
        "head's address.",
        "ADDRESS",
        aliases=("-oma",),
    )
    master_port: int | None = _flag(
        None,
        Side.BOTH,
        "Port of --omni-master-address.",
        "PORT",
        whole(1, _MAX_PORT, "that is no port"),
        ("-omp",),
    )
    join: bool = _flag(
        False,
        Side.HEAD,
        "Join the fleet at the master address as one more head: an OpenAI server without engines of its own that "
        "balances over the same replicas.",
    )
    stage_id: int = _flag(
        0,
        Side.HEADLESS,
        "Stage that the replicas of this node serve.",
        "N",
        whole(0, _MAX_STAGE_ID, "that is no stage"),
        ("--stage-id",),
    )
    replica_address: str | None = _flag(
        None,
        Side.BOTH,
        "Address on which this node's replicas listen, and under which heads find them. Default: the address from "
        "which this node reaches the head; on a head with several API servers the master address.",
        "ADDRESS",
        aliases=("-ora",),
    )
    replica_ports: str | None = _flag(
        None,
        Side.BOTH,
        "Ports on which this node's replicas listen: three for each, and two more for each further head or API server. "
        "Default: any free ones.",
        "FIRST-LAST",
    )
    heartbeat_interval: float = _flag(
        1.0,
        Side.BOTH,
        "Seconds between the signs of life of a replica, and between questions to an engine whether it answers; under "
        "a third of --omni-heartbeat-timeout.",
        "SECONDS",
        seconds,
    )
    heartbeat_timeout: float = _flag(
        10.0,
        Side.BOTH,
        "Seconds of silence after which a replica is taken for dead, and after which an engine that does not answer is "
        "no longer trusted.",
        "SECONDS",
        seconds,
    )
    secret_file: str | None = _flag(
        None,
        Side.BOTH,
        "File with the secret that all nodes of the fleet share: links between nodes are then encrypted, and open to "
        "its holders only. Its mode must be 0600. A second line is a second secret that is accepted too, for rotation. "
        "Without it links on loopback have a secret of this user's own, and others are refused.",
        "FILE",
    )
    insecure: bool = _flag(
        False,
        Side.BOTH,
        "Do without a secret, on loopback and elsewhere: everybody who reaches the fleet's ports can use and harm it.",
    )
    any_vllm: bool = _flag(
        False,
        Side.BOTH,
        "Go on with a version of vLLM that this version of the plugin is not made for, where these flags are refused "
        "otherwise. Anything may go wrong.",
    )
    admin_key_file: str | None = _flag(
        None,
        Side.HEAD,
        "File with the admin keys, one per line, of 16 or more characters; its mode should be 0600. Changing the fleet "
        "over HTTP (DELETE, drain, resume) and explain then need one of them as a bearer token. Default: none; these "
        "are answered to loopback addresses of this machine only.",
        "FILE",
    )
    max_message_size: int = _flag(
        512,
        Side.BOTH,
        "Largest message between a head and a replica of another process, in MiB: of requests as their node says, of "
        "outputs as the head says. A request that is larger fails alone, before it is sent.",
        "MIB",
        whole(1, _MAX_MESSAGE_MIB, "that is no size"),
    )
    migration_limit: int = _flag(
        3,
        Side.HEAD,
        "How often a request may move to another replica because its replica was lost, before it fails.",
        "N",
        whole(0, reason="a request cannot move a negative number of times"),
    )
    replica_wait: float = _flag(
        60.0,
        Side.HEAD,
        "Seconds that requests wait while no replica can serve, before they are refused with 503.",
        "SECONDS",
        seconds,
    )
    admission: str | None = _flag(
        None,
        Side.HEAD,
        "YAML file that says who goes first and who is refused when there is more to do than replicas can begin: "
        "classes, weights and limits of tenants, bounds of the queue. It is read again at SIGHUP and at "
        "POST /omni/admission.",
        "FILE",
        os.path.abspath,
    )
    tenant_header: str | None = _flag(
        None,
        Side.HEAD,
        "Header of a request that names its tenant; without it the API key tells tenants apart. Default: X-Tenant-ID, "
        "else x-gateway-fairness-id, with --omni-admission; otherwise requests have no tenants.",
        "NAME",
        header_name,
    )
    drain_timeout: float = _flag(
        300.0,
        Side.BOTH,
        "Seconds that running requests have to finish after SIGTERM. What still runs then moves from a headless node, "
        "and is aborted by a head, where --shutdown-timeout counts instead if it is above 0. A second signal ends the "
        "wait.",
        "SECONDS",
        seconds,
    )
    join_timeout: float = _flag(
        300.0,
        Side.HEADLESS,
        "Seconds in which this node must find the head for the first time, or it ends with an error; 0: no limit.",
        "SECONDS",
        seconds,
    )

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


FLAGS: tuple[Flag, ...] = tuple(each.metadata["flag"](each.name) for each in fields(OmniConfig))
"""All flags, in the order of the page."""
