"""The addresses on which the processes of a fleet listen and find each other, and the secret of these links."""

import argparse
import errno
import ipaddress
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.curve import user_secret
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.options.additional_config import exit_usage_error
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)


def bind_address(options: OmniConfig, headless: bool) -> str:
    """The numeric address to bind. Raises ConfigError if a name does not resolve or there is no route to the head."""
    assert options.master_address is not None
    if not headless:
        return resolve(options.master_address, "--omni-master-address")
    if options.replica_address is not None:
        return resolve(options.replica_address, "--omni-replica-address")
    hint = "; give the address to announce with --omni-replica-address if the network is not up yet"
    return address_towards(options.master_address, options.master_port or 0, "--omni-master-address", hint)


def address_towards(host: str, port: int, flag: str, hint: str = "") -> str:
    """This machine's numeric address on the way to another one. Raises ConfigError naming the flag of that."""
    master = resolve(host, flag)
    family = socket.AF_INET6 if ":" in master else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing, but makes the system choose the route and the local address.
            probe.connect((master, port))
        except OSError as error:
            raise ConfigError(
                f"argument {flag}: there is no route to {master} from here ({error.strerror}){hint}"
            ) from error
        address: str = probe.getsockname()[0]
        return address


def engines_address(options: OmniConfig) -> str:
    """The numeric address at which other machines reach the engines of a head. Raises ConfigError as `bind_address`."""
    # The doctor imports this module without vLLM.
    from vllm.utils.network_utils import get_ip

    if options.replica_address is not None:
        return resolve(options.replica_address, "--omni-replica-address")
    address = bind_address(options, headless=False)
    return get_ip() if ipaddress.ip_address(address).is_unspecified else address


def coordinator_address(options: OmniConfig) -> str:
    """The ZMQ address of the head's coordinator. Blocks while a name is resolved.

    A name is kept, since the head may move, unless it resolves to IPv6 only: ZMQ resolves names to IPv4.
    """
    assert options.master_address is not None
    host = options.master_address
    with suppress(ConfigError):
        address = resolve(host, "--omni-master-address")
        host = f"[{address}]" if ":" in address else host
    return f"tcp://{host}:{options.master_port}"


def listen_for_clients(
    setup_server: Callable[..., tuple[str, socket.socket]], args: argparse.Namespace, *, reuse_port: bool
) -> tuple[str, socket.socket]:
    """Call vLLM's `setup_server`; exits like argparse if the address cannot be bound.

    `args.port` 0 becomes the port that was bound, for all that is named after it.
    """
    try:
        url, listening = setup_server(args, reuse_port=reuse_port)
    except OSError as error:
        if args.uds:
            exit_usage_error(not_bindable("--uds", args.uds, error, ": remove the file if no server uses it"))
        flag = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
        exit_usage_error(not_bindable(flag, f"{args.host or '0.0.0.0'} port {args.port}", error))
    if not args.uds and not args.port:
        args.port = listening.getsockname()[1]
        url = f"{url.rpartition(':')[0]}:{args.port}"
    return url, listening


def not_bindable(flag: str, where: str, error: OSError, hint_if_used: str = "") -> ConfigError:
    """The error of a flag that names an address at which this process cannot listen. The hint: if another one does."""
    # Python adds the address to the system's words, and those for names are not the system's.
    why = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
    hint = hint_if_used if error.errno == errno.EADDRINUSE else ""
    return ConfigError(f"argument {flag}: {where} cannot be bound on this machine: {why}{hint}")


def check_exposure(options: OmniConfig, address: str, headless: bool) -> None:
    """Raise ConfigError if other machines reach the address, and there is neither a secret nor `--omni-insecure`."""
    if options.secret_file is not None or options.insecure or ipaddress.ip_address(address).is_loopback:
        return
    flag = "--omni-master-address"
    if headless and options.replica_address is not None:
        flag = "--omni-replica-address"
    elif headless:
        address = f"this node's address on the way to the head ({address})"
    raise ConfigError(
        f"argument {flag}: {address} can be reached from other machines, and without a secret everybody there could "
        "use and harm the fleet. Give all nodes the same --omni-secret-file, or accept that with --omni-insecure"
    )


def with_secret(options: OmniConfig, address: str, headless: bool = False) -> OmniConfig:
    """The options with a secret for links at this address: the given one, or on loopback the secret of this user.

    Raises ConfigError as `check_exposure` does, or if the secret of this user cannot be created.
    """
    if options.secret_file is not None or options.insecure:
        return options
    if ipaddress.ip_address(address).is_loopback:
        return replace(options, secret_file=user_secret())
    if not options.join:
        check_exposure(options, address, headless)
    return options


def warn_if_insecure(options: OmniConfig, address: str) -> None:
    if options.insecure:
        logger.warning("--omni-insecure: everybody who reaches %s can use and harm this fleet.", address)


def log_join_command(options: OmniConfig, address: str) -> None:
    """Log the flags with which nodes and heads join. `address`: bound by the coordinator."""
    unspecified = ipaddress.ip_address(address).is_unspecified
    host = "<an address of this machine>" if unspecified else options.master_address
    where = f"--omni-master-address {host} --omni-master-port {options.master_port}"
    logger.info("Replicas join with: --headless %s; another head with: --omni-join %s", where, where)


def resolve(host: str, flag: str) -> str:
    """The numeric address of a host. Raises ConfigError naming the flag."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"argument {flag}: {host!r} is not an address and not a known name: {why}") from error
    # All nodes must use the same family of a name that has both, and ZMQ uses IPv4.
    ipv4 = [entry for entry in found if entry[0] == socket.AF_INET]
    return str((ipv4 or found)[0][4][0])
