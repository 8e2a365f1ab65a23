"""Where the processes of a fleet listen and find each other, and what guards that."""

import ipaddress
import socket
from contextlib import suppress
from dataclasses import replace

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.curve import user_secret
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)


def bind_address(options: OmniConfig, headless: bool) -> str:
    """The numeric address that this process binds for the fleet.

    Raises:
        ConfigError: a name does not resolve, or there is no way to the head.
    """
    assert options.master_address is not None
    if not headless:
        return _resolve(options.master_address, "--omni-master-address")
    if options.replica_address is not None:
        return _resolve(options.replica_address, "--omni-replica-address")
    master = _resolve(options.master_address, "--omni-master-address")
    family = socket.AF_INET6 if ":" in master else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            # Connecting a datagram socket sends nothing; it makes the system choose the way and our end of it.
            probe.connect((master, options.master_port))
        except OSError as error:
            raise ConfigError(
                f"argument --omni-master-address: there is no way to {master} from here ({error.strerror}); give the "
                "address to announce with --omni-replica-address if the network is still to come"
            ) from error
        address: str = probe.getsockname()[0]
        return address


def coordinator_address(options: OmniConfig) -> str:
    """The ZMQ address on which a headless node finds the head; looking it up may block.

    A name stays one, since the head may come later and elsewhere, unless it is one of IPv6 alone: ZMQ looks names up as
    IPv4.
    """
    assert options.master_address is not None
    host = options.master_address
    with suppress(ConfigError):
        address = _resolve(host, "--omni-master-address")
        host = f"[{address}]" if ":" in address else host
    return f"tcp://{host}:{options.master_port}"


def check_exposure(options: OmniConfig, address: str, headless: bool) -> None:
    """Refuse to listen where other machines reach, without a secret and without the user's word that this is wanted.

    Raises:
        ConfigError: naming the flag, the address, and what to do.
    """
    if options.secret_file is not None or options.insecure or ipaddress.ip_address(address).is_loopback:
        return
    flag = "--omni-replica-address" if headless else "--omni-master-address"
    raise ConfigError(
        f"argument {flag}: {address} can be reached from other machines, and without a secret everybody there could "
        "use and harm the fleet. Give all nodes the same --omni-secret-file, or accept that with --omni-insecure"
    )


def with_secret(options: OmniConfig, address: str, headless: bool = False) -> OmniConfig:
    """The options with the secret of links at this address: on loopback this user's own, unless they say otherwise.

    Raises:
        ConfigError: see `check_exposure`; or this user's own secret cannot be made.
    """
    if options.secret_file is not None or options.insecure:
        return options
    if ipaddress.ip_address(address).is_loopback:
        return replace(options, secret_file=user_secret())
    if not options.join:
        check_exposure(options, address, headless)
    return options


def warn_if_insecure(options: OmniConfig, address: str) -> None:
    """Say, where a process begins to listen, what the user has accepted."""
    if options.insecure:
        logger.warning("--omni-insecure: everybody who reaches %s can use and harm this fleet.", address)


def log_join_command(options: OmniConfig, address: str) -> None:
    """Log what nodes and heads are to be given, where the coordinator has bound `address`."""
    every = ipaddress.ip_address(address).is_unspecified
    found_at = "<an address of this machine>" if every else options.master_address
    where = f"--omni-master-address {found_at} --omni-master-port {options.master_port}"
    logger.info("Replicas join with: --headless %s; another head with: --omni-join %s", where, where)


def _resolve(host: str, flag: str) -> str:
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"argument {flag}: {host!r} is no address and no known name: {error.strerror}") from error
    # Of a name with both, every node must take the same family, and ZMQ takes this one.
    ipv4 = [entry for entry in found if entry[0] == socket.AF_INET]
    return str((ipv4 or found)[0][4][0])
