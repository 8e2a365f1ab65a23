"""Rules for our flags: which combinations are valid, and whether their files and addresses can be used."""

import ipaddress
import socket
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from vllm_omni_plugin.admin.admin_keys import read_admin_keys
from vllm_omni_plugin.admission import load_admission
from vllm_omni_plugin.balancing import build_load_balancer_factory
from vllm_omni_plugin.config import ADMIN_KEY_FLAG, FLAGS, OmniConfig, Side
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.options.listening import bind_address, check_exposure, not_bindable, resolve
from vllm_omni_plugin.replicas.links.replica_ports import ADDRESS_FLAG, PortRange
from vllm_omni_plugin.replicas.replica_server.served_engine import HEAD_SLOTS

_IS_OF_HEAD = "not allowed with --headless: it is the head's"
_REPLICA_FIELDS = ("replica_address", "replica_ports")
_NO_LISTENING_REPLICA = (
    "on a head it needs --omni-master-address and several API servers (--api-server-count): replicas of a single one "
    "do not listen on the network"
)
_NO_LINK = (
    "needs --omni-master-address and --omni-master-port, or several API servers: without them there is no link between "
    "processes"
)
_LINK_FIELDS = ("lease_timeout", "secret_file", "insecure", "max_message_size")
_BEATS_PER_TIMEOUT = 3
_KEY_IN_PIPELINE_FILE = {"lb_policy": "policy", "lb_config": "policy_config", "dp_size_local": "replicas"}
"""The fields that a pipeline's file sets for each stage."""


def check(options: OmniConfig, given: Collection[str], headless: bool, api_servers: int = 1) -> None:
    """Check the options against each other and this machine; `given` are fields. Raises ConfigError naming the flag."""
    _refuse(given, Side.HEAD if headless else Side.HEADLESS, _IS_OF_HEAD if headless else "needs --headless")
    _check_join(options, given)
    if not headless:
        if api_servers > HEAD_SLOTS:
            raise ConfigError(
                f"argument --api-server-count: {api_servers} API servers (one for each data-parallel rank, unless "
                f"given): a replica serves at most {HEAD_SLOTS} heads, and each API server is a head"
            )
        if options.join:
            _refuse(given, _REPLICA_FIELDS, "not allowed with --omni-join: such a head has no replicas")
        if api_servers < 2 or not options.is_open:
            _refuse(given, _REPLICA_FIELDS, _NO_LISTENING_REPLICA)
        for field, key in _KEY_IN_PIPELINE_FILE.items() if "pipeline" in given else ():
            _refuse(given, (field,), f"not allowed with --omni-pipeline: the file has {key!r} for each stage")
    _check_master(options, headless)
    _check_heartbeats(options)
    if options.admin_key_file is not None:
        if options.admin_loopback:
            raise ConfigError(f"argument --omni-admin-loopback: not allowed with {ADMIN_KEY_FLAG}: choose one of them")
        read_admin_keys(options.admin_key_file, ADMIN_KEY_FLAG)
    if options.admission is not None:
        with _naming("--omni-admission"):
            load_admission(options.admission)
    if not options.is_open and api_servers < 2:
        _refuse(given, _LINK_FIELDS, _NO_LINK)
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
    try:
        address = bind_address(options, headless)
    except ConfigError:
        if headless and options.replica_address is None:
            # The head's name may not resolve until the head is there; the node resolves it again when it starts.
            return
        raise
    if not headless:
        hint = "; if another head has it, join its fleet with --omni-join"
        _check_bindable(address, options.master_port or 0, "--omni-master-address", hint)
    if options.replica_address is not None:
        own = resolve(options.replica_address, ADDRESS_FLAG)
        if ipaddress.ip_address(own).is_unspecified:
            raise ConfigError(f"argument {ADDRESS_FLAG}: {own} is a wildcard; heads need an address to connect to")
        _check_bindable(own, 0, ADDRESS_FLAG)
    check_exposure(options, address, headless)


def check_policy(options: OmniConfig) -> None:
    """Build the load-balancing policy, to see that it can be built. Raises ConfigError naming the flag."""
    with _naming("--omni-lb-policy"):
        build_load_balancer_factory(options.lb_policy)
    with _naming("--omni-lb-config"):
        build_load_balancer_factory(options.lb_policy, options.lb_config)


@contextmanager
def _naming(flag: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"argument {flag}: {error}") from error


def _refuse(given: Collection[str], which: Side | Collection[str], why: str) -> None:
    """Raise ConfigError for the first given flag of a side, or of these fields."""
    for flag in FLAGS:
        if flag.field in given and (flag.side is which if isinstance(which, Side) else flag.field in which):
            raise ConfigError(f"argument {flag.name}: {why}")


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


def _check_master(options: OmniConfig, headless: bool) -> None:
    """A fleet needs address and port, a node both, and somewhere there must be a replica."""
    address, port = ("--omni-master-address", options.master_address), ("--omni-master-port", options.master_port)
    for (flag, value), (other, missing) in ((address, port), (port, address)):
        if value is not None and missing is None:
            raise ConfigError(f"argument {flag}: needs {other} too")
    if headless and not options.is_open:
        raise ConfigError(
            "argument --omni-master-address: a node needs it, and --omni-master-port: the address of the head to join"
        )
    if options.dp_size_local == 0 and (headless or not options.is_open):
        need = " with --headless" if headless else ", or else --omni-master-address, so that others can join"
        raise ConfigError(f"argument --omni-dp-size-local: 0 replicas: there must be at least one{need}")


def _check_heartbeats(options: OmniConfig) -> None:
    interval, timeout = options.heartbeat_interval, options.heartbeat_timeout
    if not 0 < interval * _BEATS_PER_TIMEOUT < timeout:
        raise ConfigError(
            f"argument --omni-heartbeat-interval: {interval} s must be positive and under a third of "
            f"--omni-heartbeat-timeout, {timeout} s, so that one lost heartbeat does not count as a dead replica"
        )
    if not options.lease_timeout:
        raise ConfigError("argument --omni-lease-timeout: 0 s must be positive")


def _check_bindable(address: str, port: int, flag: str, hint_if_used: str = "") -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        # As ZMQ binds: connections of an earlier process in TIME_WAIT do not matter.
        socket.create_server((address, port), family=family).close()
    except OSError as error:
        where = f"{address} port {port}" if port else address
        raise not_bindable(flag, where, error, hint_if_used) from error
