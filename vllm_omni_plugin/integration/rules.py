"""Which of our flags go together, and what each needs of this machine. Checked before anything starts."""

import ipaddress
import socket
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace

from vllm_omni_plugin.admin.keys import read_admin_keys
from vllm_omni_plugin.config import ADMIN_KEY_FLAG, OmniConfig
from vllm_omni_plugin.curve import Secrets, own_secret
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.flag_table import FLAGS, Side
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.ports import PortRange
from vllm_omni_plugin.replicas.served_engine import HEAD_SLOTS

logger = init_logger(__name__)

_OF_THE_LINKS = ("secret_file", "insecure", "max_message_size")
_BEATS_PER_TIMEOUT = 3
_SEVERAL = 2
_IN_THE_FILE = {"lb_policy": "policy", "lb_config": "policy_config", "dp_size_local": "replicas"}
"""What a pipeline's file says by stage, and the key there."""


def check(options: OmniConfig, given: Collection[str], headless: bool, api_servers: int = 1) -> None:
    """Check the options against each other and against this machine.

    Args:
        options: what the flags say.
        given: fields of `OmniConfig` whose flags were given.
        headless: whether `--headless` was given.
        api_servers: how many API server processes there will be.

    Raises:
        ConfigError: naming the flag, the reason and what to do.
    """
    _check_side(given, headless)
    _check_join(options, given)
    if not headless:
        _check_api_servers(api_servers)
        _check_replica_servers(options, given, api_servers)
    _refuse_beside_pipeline(given, headless)
    _check_master(options, headless)
    _check_heartbeats(options)
    if options.admin_key_file is not None:
        read_admin_keys(options.admin_key_file, ADMIN_KEY_FLAG)
    if not options.is_open and api_servers < _SEVERAL:
        _refuse_without_master(given)
    if options.secret_file is not None:
        if options.insecure:
            raise ConfigError("argument --omni-insecure: not allowed with --omni-secret-file: choose one of them")
        Secrets.from_file(options.secret_file)
    if not options.is_open:
        return
    if options.replica_ports is not None:
        PortRange.parse(options.replica_ports)
    if options.join:
        return
    if not headless:
        address = bind_address(options, headless)
        _check_bindable(address, options.master_port or 0, "--omni-master-address")
    elif options.replica_address is not None:
        address = bind_address(options, headless)
        _check_bindable(address, 0, "--omni-replica-address")
    else:
        try:
            address = bind_address(options, headless)
        except ConfigError:
            # The head's name may come with the head; the node looks for it again when it starts.
            return
    check_exposure(options, address, headless)


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


def _check_side(given: Collection[str], headless: bool) -> None:
    other = Side.HEAD if headless else Side.HEADLESS
    for flag in FLAGS:
        if flag.side is other and flag.field in given:
            where = "not allowed with --headless: it is the head's" if headless else "needs --headless"
            raise ConfigError(f"argument {flag.name}: {where}")


def _check_join(options: OmniConfig, given: Collection[str]) -> None:
    if not options.join:
        return
    if not options.is_open:
        raise ConfigError("argument --omni-join: needs --omni-master-address and --omni-master-port, the fleet to join")
    if "dp_size_local" in given and options.dp_size_local:
        raise ConfigError(
            "argument --omni-dp-size-local: not allowed with --omni-join: such a head has no engines; start replicas "
            "beside it with --headless"
        )


def _check_api_servers(api_servers: int) -> None:
    if api_servers > HEAD_SLOTS:
        raise ConfigError(
            f"argument --api-server-count: {api_servers} API servers (one for each data-parallel rank, unless given): "
            f"a replica serves at most {HEAD_SLOTS} heads, and each API server is one"
        )


def _check_replica_servers(options: OmniConfig, given: Collection[str], api_servers: int) -> None:
    for flag in FLAGS:
        if flag.field in ("replica_address", "replica_ports") and flag.field in given:
            if options.join:
                raise ConfigError(f"argument {flag.name}: not allowed with --omni-join: such a head has no replicas")
            if api_servers < 2 or not options.is_open:
                raise ConfigError(
                    f"argument {flag.name}: on a head it needs --omni-master-address and several API servers "
                    "(--api-server-count): one alone keeps its replicas to itself"
                )


def _refuse_beside_pipeline(given: Collection[str], headless: bool) -> None:
    if headless or "pipeline" not in given:
        return
    for flag in FLAGS:
        key = _IN_THE_FILE.get(flag.field)
        if key is not None and flag.field in given:
            raise ConfigError(
                f"argument {flag.name}: not allowed with --omni-pipeline: the file has {key!r} for each stage"
            )


def _check_master(options: OmniConfig, headless: bool) -> None:
    if (options.master_address is None) != (options.master_port is None):
        there, missing = "--omni-master-address", "--omni-master-port"
        if options.master_address is None:
            there, missing = missing, there
        raise ConfigError(f"argument {there}: needs {missing} too")
    if headless and not options.is_open:
        raise ConfigError(
            "argument --headless: with --omni-* flags it needs --omni-master-address and --omni-master-port, the head "
            "to join"
        )
    if options.dp_size_local == 0 and (headless or not options.is_open):
        need = " with --headless" if headless else ", or else --omni-master-address, so that others can join"
        raise ConfigError(f"argument --omni-dp-size-local: 0 replicas: there must be at least one{need}")


def _check_heartbeats(options: OmniConfig) -> None:
    interval, timeout = options.heartbeat_interval, options.heartbeat_timeout
    if not 0 < interval * _BEATS_PER_TIMEOUT < timeout:
        raise ConfigError(
            f"argument --omni-heartbeat-interval: {interval} s must be positive and under a third of "
            f"--omni-heartbeat-timeout, {timeout} s, so that a lost heartbeat is not taken for a death"
        )


def _refuse_without_master(given: Collection[str]) -> None:
    for flag in FLAGS:
        if flag.field in _OF_THE_LINKS and flag.field in given:
            raise ConfigError(
                f"argument {flag.name}: needs --omni-master-address and --omni-master-port, or several API servers: "
                "without them there is no link between processes"
            )


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


def secured(options: OmniConfig, address: str, headless: bool = False) -> OmniConfig:
    """The options with the secret of links at this address: on loopback this user's own, unless they say otherwise.

    Raises:
        ConfigError: see `check_exposure`; or this user's own secret cannot be made.
    """
    if options.secret_file is not None or options.insecure:
        return options
    if ipaddress.ip_address(address).is_loopback:
        return replace(options, secret_file=own_secret())
    if not options.join:
        check_exposure(options, address, headless)
    return options


def warn_of_exposure(options: OmniConfig, address: str) -> None:
    """Say, where a process begins to listen, what the user has accepted."""
    if options.insecure:
        logger.warning("--omni-insecure: everybody who reaches %s can use and harm this fleet.", address)


def say_how_to_join(options: OmniConfig, address: str) -> None:
    """Log what nodes and heads are to be given, where the coordinator has bound `address`."""
    every = ipaddress.ip_address(address).is_unspecified
    found_at = "<an address of this machine>" if every else options.master_address
    where = f"--omni-master-address {found_at} --omni-master-port {options.master_port}"
    logger.info("Replicas join with: --headless %s; another head with: --omni-join %s", where, where)


def _check_bindable(address: str, port: int, flag: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As ZMQ binds, so that connections of a predecessor that are winding down do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            where = f"{address} port {port}" if port else address
            raise ConfigError(f"argument {flag}: {where} cannot be bound on this machine: {error.strerror}") from error


def _resolve(host: str, flag: str) -> str:
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise ConfigError(f"argument {flag}: {host!r} is no address and no known name: {error.strerror}") from error
    # Of a name with both, every node must take the same family, and ZMQ takes this one.
    ipv4 = [entry for entry in found if entry[0] == socket.AF_INET]
    return str((ipv4 or found)[0][4][0])
