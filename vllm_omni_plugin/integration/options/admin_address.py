"""Where the operator's HTTP server of a head with vLLM's Rust front end listens, and the ports of a head."""

import argparse
from ipaddress import ip_address

from vllm import envs

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.replicas.links.replica_ports import PORTS_FLAG, PortRange

_MAX_PORT = 65535
_LOOPBACK, _ALL = "127.0.0.1", "0.0.0.0"
_ADMIN_FLAG = "--omni-admin-port"
_MASTER_FLAG = "--omni-master-port"


def admin_address(options: OmniConfig, args: argparse.Namespace) -> tuple[str, int]:
    """The address and port: loopback, unless the operator gave keys and clients have no unix socket."""
    host = args.host or (_LOOPBACK if args.uds else _ALL)
    if options.admin_key_file is None:
        host = _LOOPBACK
    return host, args.port + 1 if options.admin_port is None else options.admin_port


def check_ports(options: OmniConfig, args: argparse.Namespace) -> None:
    """Raise ConfigError if a port of this head has two uses, or an admin port is given without the Rust front end.

    While engines load, the port of clients is bound, but nothing listens there, and the system lets others do so.
    """
    host = args.host or _ALL
    uses = [] if args.uds else [(host, args.port, "the OpenAI server (--port)")]
    if (grpc_port := getattr(args, "grpc_port", None)) is not None:
        uses.append((_LOOPBACK if args.uds else host, grpc_port, "gRPC (--grpc-port)"))
    own: list[tuple[str, str, int, str]] = []
    if envs.VLLM_USE_RUST_FRONTEND:
        admin_host, admin_port = admin_address(options, args)
        if admin_port > _MAX_PORT:
            raise ConfigError(f"argument {_ADMIN_FLAG}: needed, because there is no port after --port {args.port}")
        own.append((_ADMIN_FLAG, admin_host, admin_port, f"operators ({_ADMIN_FLAG}, by default the one after --port)"))
    elif options.admin_port is not None:
        raise ConfigError(
            f"argument {_ADMIN_FLAG}: needs vLLM's Rust front end (VLLM_USE_RUST_FRONTEND=1): without it the routes "
            "under /omni, /metrics and /health are on the head's own port"
        )
    master = options.master_address or _ALL
    if options.master_port is not None and not options.join:
        own.append((_MASTER_FLAG, master, options.master_port, f"nodes ({_MASTER_FLAG})"))
    for flag, address, port, use in own:
        for other, taken, what in uses:
            if port == taken and _meet(address, other):
                raise ConfigError(f"argument {flag}: {port} is the port of {what}; give another one")
        uses.append((address, port, use))
    if options.replica_ports is not None:
        ports = PortRange.parse(options.replica_ports)
        for other, port, what in uses:
            if ports.first <= port <= ports.last and _meet(options.replica_address or master, other):
                raise ConfigError(f"argument {PORTS_FLAG}: {port} is the port of {what}; give others")


def _meet(one: str, other: str) -> bool:
    """Whether sockets at both addresses cannot have the same port. A name may stand for any address."""
    try:
        addresses = {ip_address(one.strip("[]")), ip_address(other.strip("[]"))}
    except ValueError:
        return True
    return len(addresses) == 1 or any(address.is_unspecified for address in addresses)
