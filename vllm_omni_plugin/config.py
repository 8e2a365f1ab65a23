"""The options of a head or a headless node, and the flags that set them."""

import argparse
import ipaddress
import json
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import partial
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
_HOST_NAME = re.compile(r"(?![\d.]+\Z)[\w.-]+")
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class Side(Enum):
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
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    if value < 0:
        raise argparse.ArgumentTypeError(f"{text} s is below 0")
    return value


def host(text: str) -> str:
    """An address, or a name that may be known later. No list of names ever has the others."""
    with suppress(ValueError):
        ipaddress.ip_address(text.strip("[]"))
        return text
    with suppress(UnicodeError):
        # Python looks up no name with an empty part, or one of more than 63 characters.
        if _HOST_NAME.fullmatch(text) and text.encode("idna"):
            return text
    raise argparse.ArgumentTypeError(
        f"{text!r} is neither an address nor the name of a host; its port has a flag of its own"
    )


def header_name(text: str) -> str:
    if not _HEADER_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid name of an HTTP header")
    return text


def json_object(text: str) -> dict[str, Any]:
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


_seconds = partial(_flag, metavar="SECONDS", type=seconds)
_file = partial(_flag, None, metavar="FILE")
_address = partial(_flag, None, metavar="ADDRESS", type=host)
_port = partial(_flag, None, metavar="PORT", type=integer(1, _MAX_PORT))
_mebibytes = partial(_flag, metavar="MIB", type=integer(1, _MAX_MESSAGE_MIB))
_number = partial(_flag, metavar="N")


@dataclass(frozen=True)
class OmniConfig:
    """The values of the `--omni-*` flags. Each field is set by the flag of the same name, and explained by its help.

    Never add a secret as a field, only its path: vLLM carries these options in its `additional_config`, which it shows
    to everybody who asks for its configuration.
    """

    pipeline: str | None = _file(
        Side.BOTH,
        "YAML file of a pipeline. Engine flags on the command line apply to all its vLLM stages, unless the file "
        "overrides them.",
        type=os.path.abspath,
    )
    lb_policy: str = _flag(
        "prefix",
        Side.HEAD,
        "Load-balancing policy: random, round-robin, least-queue-length, least-tokens, session, prefix, kv-aware, "
        "the name of an installed policy, or package.module:Class.",
        "POLICY",
    )
    lb_config: dict[str, Any] | None = _flag(  # noqa: RUF009 - it makes a `field`
        None, Side.HEAD, 'Options of the policy, such as {"decode_weight": 0.2} for least-tokens.', "JSON", json_object
    )
    dp_size_local: int = _number(
        1, Side.BOTH, "Replicas that this process runs itself. A head may have none (0).", type=integer(0)
    )
    master_address: str | None = _address(
        Side.BOTH,
        "On a head: the address on which it accepts nodes. With --headless: the head's address.",
        aliases=("-oma",),
    )
    master_port: int | None = _port(Side.BOTH, "Port of --omni-master-address.", aliases=("-omp",))
    join: bool = _flag(False, Side.HEAD, "Join the fleet at the master address as one more head, without engines.")
    stage_id: int = _number(
        0,
        Side.HEADLESS,
        "Stage that the replicas of this node serve.",
        type=integer(0, _MAX_STAGE_ID),
        aliases=("--stage-id",),
    )
    replica_address: str | None = _address(
        Side.BOTH,
        "Address on which this node's replicas listen. Default: the one from which it reaches the head; on a head "
        "with several API servers the master address.",
        aliases=("-ora",),
    )
    replica_ports: str | None = _flag(
        None,
        Side.BOTH,
        "Ports on which this node's replicas listen: three for each, and two more for each further head or API "
        "server. Default: any free ones.",
        "FIRST-LAST",
    )
    heartbeat_interval: float = _seconds(
        1.0,
        Side.BOTH,
        "Seconds between heartbeats of a replica, and probes of an engine; under a third of --omni-heartbeat-timeout.",
    )
    heartbeat_timeout: float = _seconds(
        10.0,
        Side.BOTH,
        "Seconds without a heartbeat after which a replica is dead, and without an answer after which an engine hangs.",
    )
    lease_timeout: float = _seconds(
        3.0,
        Side.HEAD,
        "Seconds without an answer of a replica's machine after which this head counts it as lost, unless the "
        "heartbeat timeout is shorter. After a third of it the replica gets no new requests.",
    )
    stall_timeout: float = _seconds(
        60.0,
        Side.HEAD,
        "Seconds without a token for any request of a replica after which its requests move; at least four times "
        "the longest gap between two outputs of it. 0: no limit.",
    )
    secret_file: str | None = _file(
        Side.BOTH,
        "File with the secret of the fleet; mode 0600. A second line is accepted, too, for rotation. Without this "
        "flag, links on loopback use a secret of this user, and others are refused.",
    )
    insecure: bool = _flag(
        False, Side.BOTH, "Use no secret anywhere: everybody who reaches the fleet's ports can use and harm it."
    )
    any_vllm: bool = _flag(
        False, Side.BOTH, "Accept a version of vLLM that this plugin does not support. Anything may go wrong."
    )
    admin_key_file: str | None = _file(
        Side.HEAD,
        "File with admin keys, one per line, of 16 or more characters; mode 0600. Changes over HTTP and explain then "
        "need one as a bearer token; without this flag the head's own key (vllm-omni-plugin admin-key), which a head "
        "with --uds does not have.",
    )
    admin_loopback: bool = _flag(
        False,
        Side.HEAD,
        "Let every client with a loopback address or of --uds change the fleet: all users of this machine, and all "
        "clients of a proxy, tunnel, sidecar or `kubectl port-forward`.",
    )
    admin_port: int | None = _port(
        Side.HEAD,
        "Port of /omni, /metrics and /health with vLLM's Rust front end: on loopback, or at --host with "
        "--omni-admin-key-file. Default: the port after --port.",
    )
    max_message_size: int = _mebibytes(
        512,
        Side.BOTH,
        "Largest message between a head and a replica of another process, in MiB. The node's value counts for "
        "requests, the head's for outputs.",
    )
    max_buffered_size: int = _mebibytes(
        64,
        Side.HEAD,
        "Most MiB of request bodies that an API server keeps while they wait for a replica. Others get 503 at once.",
    )
    migration_limit: int = _number(
        3,
        Side.HEAD,
        "How often a request may move in a stage because its replica was lost. The next loss fails it. A prefill never "
        "moves.",
        type=integer(0),
    )
    replica_wait: float = _seconds(
        60.0, Side.HEAD, "Seconds that requests wait while no replica can serve, before they are refused with 503."
    )
    admission: str | None = _file(
        Side.HEAD,
        "YAML file of the admission control, read again at SIGHUP and POST /omni/admission.",
        type=os.path.abspath,
    )
    tenant_header: str | None = _flag(
        None,
        Side.HEAD,
        "HTTP header that names the tenant of a request, or its argument in vllm_xargs with vLLM's Rust front end. "
        "Default, with --omni-admission: X-Tenant-ID, else x-gateway-fairness-id, else the API key.",
        "NAME",
        header_name,
    )
    drain_timeout: float = _seconds(
        300.0,
        Side.BOTH,
        "Seconds that running requests have to finish after SIGTERM. Then a node moves the rest, and a head aborts "
        "it. On a head --shutdown-timeout counts instead if it is above 0. A second signal ends the wait.",
    )
    join_timeout: float = _seconds(
        300.0, Side.HEADLESS, "Seconds after which this node exits if it has not reached the head; 0: no limit."
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
