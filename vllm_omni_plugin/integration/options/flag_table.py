"""Our flags as data: names, types, texts, and on which kind of node each has a meaning."""

import argparse
import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

from vllm_omni_plugin.config import ADMIN_KEY_FLAG, OmniConfig

NO_MODEL = "<named by --omni-pipeline>"
"""Stands for the model on a command line without one, until the pipeline's file has been read."""

ANY_VLLM = "--omni-any-vllm"

_MAX_STAGE_ID = 1023
_MAX_PORT = 65535
_MAX_MESSAGE_MIB = 2**20


class Side(Enum):
    """Where a flag has a meaning."""

    HEAD = "head"
    HEADLESS = "headless"
    BOTH = "both"


@dataclass(frozen=True)
class Flag:
    """One flag. Its default is that of the `OmniConfig` field of the same name.

    Attributes:
        name: the flag.
        side: where it has a meaning.
        help: its text.
        metavar: stands for its value in the text; "" if it takes none.
        type: reads its value; None: as it is.
        aliases: further names, which it has where nobody else has them.
    """

    name: str
    side: Side
    help: str
    metavar: str = ""
    type: Callable[[str], Any] | None = None
    aliases: tuple[str, ...] = ()

    @property
    def field(self) -> str:
        """The field of `OmniConfig` that it sets."""
        return self.name.removeprefix("--omni-").replace("-", "_")

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
        default = getattr(OmniConfig, self.field)
        shown = "" if default is None or not self.takes_value else f" (default: {default})"
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


FLAGS = (
    Flag(
        "--omni-pipeline",
        Side.BOTH,
        "YAML file of stages that requests run through, each with replicas of its own; it says what MODEL and the "
        "arguments of engines, replicas and policies are elsewhere. With --headless: the file of --omni-stage-id.",
        "FILE",
        os.path.abspath,
    ),
    Flag(
        "--omni-lb-policy",
        Side.HEAD,
        "How requests are balanced over the replicas: random, round-robin, least-queue-length, power-of-two, "
        "least-tokens, session, prefix, kv-aware, cost-aware, the name of an installed policy, or "
        "package.module:Class.",
        "POLICY",
    ),
    Flag(
        "--omni-lb-config",
        Side.HEAD,
        'Options of the policy as an object in JSON, such as {"decode_weight": 0.2} for least-tokens. Default: none.',
        "JSON",
        json_object,
    ),
    Flag(
        "--omni-dp-size-local",
        Side.BOTH,
        "Replicas of the model that this process runs itself. A head may have none of its own (0).",
        "N",
        whole(0, reason="there cannot be fewer replicas than none"),
    ),
    Flag(
        "--omni-master-address",
        Side.BOTH,
        "On the head: address on which replicas of other nodes join, which opens the fleet. With --headless: the "
        "head's address.",
        "ADDRESS",
        aliases=("-oma",),
    ),
    Flag(
        "--omni-master-port",
        Side.BOTH,
        "Port of --omni-master-address.",
        "PORT",
        whole(1, _MAX_PORT, "that is no port"),
        ("-omp",),
    ),
    Flag(
        "--omni-join",
        Side.HEAD,
        "Join the fleet at the master address as one more head: an OpenAI server without engines of its own that "
        "balances over the same replicas.",
    ),
    Flag(
        "--omni-stage-id",
        Side.HEADLESS,
        "Stage that the replicas of this node serve.",
        "N",
        whole(0, _MAX_STAGE_ID, "that is no stage"),
        ("--stage-id",),
    ),
    Flag(
        "--omni-replica-address",
        Side.BOTH,
        "Address on which this node's replicas listen, and under which heads find them. Default: the address from "
        "which this node reaches the head; on a head with several API servers the master address.",
        "ADDRESS",
        aliases=("-ora",),
    ),
    Flag(
        "--omni-replica-ports",
        Side.BOTH,
        "Ports on which this node's replicas listen: three for each, and two more for each further head or API server. "
        "Default: any free ones.",
        "FIRST-LAST",
    ),
    Flag(
        "--omni-heartbeat-interval",
        Side.BOTH,
        "Seconds between the signs of life of a replica, and between questions to an engine whether it answers; under "
        "a third of --omni-heartbeat-timeout.",
        "SECONDS",
        seconds,
    ),
    Flag(
        "--omni-heartbeat-timeout",
        Side.BOTH,
        "Seconds of silence after which a replica is taken for dead, and after which an engine that does not answer is "
        "no longer trusted.",
        "SECONDS",
        seconds,
    ),
    Flag(
        "--omni-secret-file",
        Side.BOTH,
        "File with the secret that all nodes of the fleet share: links between nodes are then encrypted, and open to "
        "its holders only. Its mode must be 0600. A second line is a second secret that is accepted too, for rotation. "
        "Without it links on loopback have a secret of this user's own, and others are refused.",
        "FILE",
    ),
    Flag(
        "--omni-insecure",
        Side.BOTH,
        "Do without a secret, on loopback and elsewhere: everybody who reaches the fleet's ports can use and harm it.",
    ),
    Flag(
        ANY_VLLM,
        Side.BOTH,
        "Go on with a version of vLLM that this version of the plugin is not made for, where these flags are refused "
        "otherwise. Anything may go wrong.",
    ),
    Flag(
        ADMIN_KEY_FLAG,
        Side.HEAD,
        "File with the admin keys, one per line, of 16 or more characters; its mode should be 0600. Changing the fleet "
        "over HTTP (DELETE, drain, resume) and explain then need one of them as a bearer token. Default: none; these "
        "are answered to loopback addresses of this machine only.",
        "FILE",
    ),
    Flag(
        "--omni-max-message-size",
        Side.BOTH,
        "Largest message between a head and a replica of another process, in MiB: of requests as their node says, of "
        "outputs as the head says. A request that is larger fails alone, before it is sent.",
        "MIB",
        whole(1, _MAX_MESSAGE_MIB, "that is no size"),
    ),
    Flag(
        "--omni-migration-limit",
        Side.HEAD,
        "How often a request may move to another replica because its replica was lost, before it fails.",
        "N",
        whole(0, reason="a request cannot move a negative number of times"),
    ),
    Flag(
        "--omni-replica-wait",
        Side.HEAD,
        "Seconds that requests wait while no replica can serve, before they are refused with 503.",
        "SECONDS",
        seconds,
    ),
    Flag(
        "--omni-drain-timeout",
        Side.BOTH,
        "Seconds that running requests have to finish after SIGTERM. What still runs then moves from a headless node, "
        "and is aborted by a head, where --shutdown-timeout counts instead if it is above 0. A second signal ends the "
        "wait.",
        "SECONDS",
        seconds,
    ),
    Flag(
        "--omni-join-timeout",
        Side.HEADLESS,
        "Seconds in which this node must find the head for the first time, or it ends with an error; 0: no limit.",
        "SECONDS",
        seconds,
    ),
)
