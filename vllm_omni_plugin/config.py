"""The options of a head or a headless node, and the flags that set them."""

import argparse
import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

ADMIN_KEY_FLAG = "--omni-admin-key-file"
FLEET_ENGINE = "VLLM_OMNI_FLEET_ENGINE"
"""Environment variable that marks the engine and worker processes of a fleet. Its value is the path of the file in
which an engine writes how one of its workers ended."""
NO_MODEL = "<named by --omni-pipeline>"
"""Placeholder for MODEL on a command line without one, until the pipeline's file has been read."""

_MAX_STAGE_ID = 1023
_MAX_PORT = 65535
_MAX_MESSAGE_MIB = 2**20
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Side(Enum):
    """Where a flag may be given: on a head, on a headless node, or on both."""

    HEAD = "head"
    HEADLESS = "headless"
    BOTH = "both"


@dataclass(frozen=True)
class Flag:
    """One command line flag.

    Attributes:
        field: the field of `OmniConfig` that it sets.
        metavar: "" if the flag takes no value.
        type: parses the value; None keeps the string.
        aliases: further names, used only if no other package has registered them.
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
        return f"--{self.destination.replace('_', '-')}"

    @property
    def destination(self) -> str:
        """Attribute of the parsed arguments. Its value is None if the flag was not given."""
        return f"omni_{self.field}"

    @property
    def takes_value(self) -> bool:
        return bool(self.metavar)

    def help_with_default(self) -> str:
        """The text for `--help`. The end prints nothing, but keeps vLLM's formatter from adding a default of None."""
        shown = "" if self.default is None or not self.takes_value else f" (default: {self.default})"
        return f"{self.help}{shown}%(default).0s"


def integer(minimum: int, maximum: float = math.inf) -> Callable[[str], int]:
    """An argparse type for integers from `minimum` to `maximum`."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if not minimum <= value <= maximum:
            limit = f"below {minimum}" if value < minimum else f"above {maximum}"
            raise argparse.ArgumentTypeError(f"{value} is {limit}")
        return value

    return parse


def seconds(text: str) -> float:
    """An argparse type for durations of zero or more seconds."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} s is below 0")
    return value


def header_name(text: str) -> str:
    """An argparse type for names of HTTP headers."""
    if not _HEADER_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid name of an HTTP header")
    return text


def json_object(text: str) -> dict[str, Any]:
    """An argparse type for JSON objects."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is not a JSON object, such as {{"option": 1}}')
    return value


def _flag(default: Any, *about: Any, **more: Any) -> Any:
    """A field of `OmniConfig` with its `Flag`; takes the arguments of `Flag`."""
    return field(default=default, metadata={"flag": lambda name: Flag(name, default, *about, **more)})


@dataclass(frozen=True)
class OmniConfig:
    """The values of the `--omni-*` flags. Each field is set by the flag of the same name, and explained by its help.

    Never add a secret as a field, only its path: vLLM carries these options in its `additional_config`, which it shows
    to everybody who asks for its configuration.
    """

    pipeline: str | None = _flag(
        None,
        Side.BOTH,
        "YAML file of a pipeline: its stages, and the model, replicas, policy and engine arguments of each. Engine "
        "flags on the command line apply to all vLLM stages, unless the file overrides them. A headless node runs the "
        "stage of --omni-stage-id.",
        "FILE",
        os.path.abspath,
    )
    lb_policy: str = _flag(
        "prefix",
        Side.HEAD,
        "How requests are balanced over the replicas: random, round-robin, least-queue-length, "
        "least-tokens, session, prefix, kv-aware, the name of an installed policy, or package.module:Class.",
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
        "Number of replicas that this process runs itself. A head may have none (0).",
        "N",
        integer(0),
    )
    master_address: str | None = _flag(
        None,
        Side.BOTH,
        "On a head: the address on which it accepts replicas of other nodes. With --headless: the head's address.",
        "ADDRESS",
        aliases=("-oma",),
    )
    master_port: int | None = _flag(
        None,
        Side.BOTH,
        "Port of --omni-master-address.",
        "PORT",
        integer(1, _MAX_PORT),
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
        integer(0, _MAX_STAGE_ID),
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
        "Seconds between two heartbeats of a replica, and between two probes of an engine; less than a third of "
        "--omni-heartbeat-timeout.",
        "SECONDS",
        seconds,
    )
    heartbeat_timeout: float = _flag(
        10.0,
        Side.BOTH,
        "Seconds without a heartbeat after which a replica counts as dead, and without an answer to a probe after "
        "which an engine counts as hung.",
        "SECONDS",
        seconds,
    )
    lease_timeout: float = _flag(
        3.0,
        Side.HEAD,
        "Seconds without an answer of a replica's machine after which this head counts it as lost and moves its "
        "requests, unless the heartbeat timeout is shorter. After a third of this time the replica gets no new "
        "requests. It is lost at once if its connection breaks.",
        "SECONDS",
        seconds,
    )
    stall_timeout: float = _flag(
        60.0,
        Side.HEAD,
        "Seconds without a token for any request of a replica after which it counts as stalled, though its engine "
        "answers probes: its requests move to other replicas. The limit is never below four times the longest gap "
        "between two outputs of that replica. 0: no limit.",
        "SECONDS",
        seconds,
    )
    secret_file: str | None = _flag(
        None,
        Side.BOTH,
        "File with the secret that all nodes of the fleet share. Links between nodes are then encrypted and "
        "authenticated. Its mode must be 0600. A second line is a second accepted secret, for rotation. Without this "
        "flag, links on loopback use a secret of this user, and links to other machines are refused.",
        "FILE",
    )
    insecure: bool = _flag(
        False,
        Side.BOTH,
        "Use no secret, on loopback and elsewhere: everybody who reaches the fleet's ports can use and harm it.",
    )
    any_vllm: bool = _flag(
        False,
        Side.BOTH,
        "Accept a version of vLLM that this version of the plugin does not support. Without this flag the start is "
        "refused. Anything may go wrong.",
    )
    admin_key_file: str | None = _flag(
        None,
        Side.HEAD,
        "File with the admin keys, one per line, of 16 or more characters; its mode should be 0600. Changing the fleet "
        "over HTTP (DELETE, drain, resume) and explain then need one of them as a bearer token. Without this flag they "
        "need the key that the head keeps for commands of its own user on its machine, or a unix socket (--uds).",
        "FILE",
    )
    admin_loopback: bool = _flag(
        False,
        Side.HEAD,
        "Let every client with a loopback address change the fleet: all users of this machine, and all who reach it "
        "through a proxy, a tunnel, a sidecar or `kubectl port-forward`.",
    )
    admin_port: int | None = _flag(
        None,
        Side.HEAD,
        "Port of the operator's HTTP server of a head with vLLM's Rust front end: the routes under /omni, /metrics and "
        "/health. It listens on loopback only, or with --omni-admin-key-file where --host says. Default: the port "
        "after --port. With vLLM's Python front end these routes are on the head's own port.",
        "PORT",
        integer(1, _MAX_PORT),
    )
    max_message_size: int = _flag(
        512,
        Side.BOTH,
        "Largest message between a head and a replica of another process, in MiB. The node's value limits requests, "
        "the head's value limits outputs. A larger request fails before it is sent; no other request is affected.",
        "MIB",
        integer(1, _MAX_MESSAGE_MIB),
    )
    max_buffered_size: int = _flag(
        64,
        Side.HEAD,
        "Bodies of requests that wait for a replica, in MiB, that an API server keeps. A request that needs more gets "
        "the 503 at once.",
        "MIB",
        integer(1, _MAX_MESSAGE_MIB),
    )
    migration_limit: int = _flag(
        3,
        Side.HEAD,
        "How often a request may move in a stage because its replica was lost. One more loss fails it.",
        "N",
        integer(0),
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
        "YAML file of the admission control: request classes, weights and limits of tenants, bounds of the wait queue. "
        "It is read again at SIGHUP and at POST /omni/admission.",
        "FILE",
        os.path.abspath,
    )
    tenant_header: str | None = _flag(
        None,
        Side.HEAD,
        "HTTP header that names the tenant of a request; with vLLM's Rust front end the argument of that name in its "
        "vllm_xargs. A request without it belongs to the tenant of its API key, with the Python front end. "
        "Default: X-Tenant-ID, else x-gateway-fairness-id, with --omni-admission; otherwise requests have no tenants.",
        "NAME",
        header_name,
    )
    drain_timeout: float = _flag(
        300.0,
        Side.BOTH,
        "Seconds that running requests have to finish after SIGTERM. Then a headless node moves the rest to other "
        "replicas, and a head aborts the rest. On a head, --shutdown-timeout counts instead if it is above 0. A second "
        "signal ends the wait.",
        "SECONDS",
        seconds,
    )
    join_timeout: float = _flag(
        300.0,
        Side.HEADLESS,
        "Seconds after which this node exits with an error if it has not reached the head yet; 0: no limit.",
        "SECONDS",
        seconds,
    )

    @property
    def is_open(self) -> bool:
        """Whether replicas of other processes can join."""
        return self.master_address is not None

    @property
    def max_message_bytes(self) -> int:
        return self.max_message_size * 2**20

    @property
    def max_buffered_bytes(self) -> int:
        return self.max_buffered_size * 2**20


FLAGS: tuple[Flag, ...] = tuple(each.metadata["flag"](each.name) for each in fields(OmniConfig))
"""All flags, in the order of docs/flags.md."""
