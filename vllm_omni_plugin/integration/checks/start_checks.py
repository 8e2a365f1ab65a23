"""Checks of the resources that replicas need, before any of them starts. Takes milliseconds."""

import os
import tempfile
from collections.abc import Iterator

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.integration.checks.check_result import CheckResult, Level
from vllm_omni_plugin.integration.options.additional_config import exit_usage_error
from vllm_omni_plugin.integration.options.listening import bind_address
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.engine.socket_folder import LONGEST_BASE, LONGEST_BASE_OF_FOLDERS, socket_base
from vllm_omni_plugin.replicas.links.replica_ports import REPLICA_PORTS, PortRange, close_all, listen_on_ports
from vllm_omni_plugin.replicas.replica_server.descriptor_limits import check_limits, files_beside_own

logger = init_logger(__name__)

_CONNECTIONS_OF_CLIENTS = 1024
"""The default limit of file descriptors of many systems."""
_SHORTER = "TMPDIR or VLLM_RPC_BASE_PATH"
SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_PER_WORKER = 64 * 2**20
"""For queues of vLLM and of NCCL. It is also all that a container has by default."""
LEAST_SHARED_MEMORY = 240 * 2**20
"""vLLM starts no worker where less is free: the size of its largest queue, of which most stays unused."""


def check_or_exit(
    options: OmniConfig, replicas: int, workers: int, headless: bool, *, rust_front_end: bool = False
) -> None:
    """Run `check_start`, log its warnings, and exit like argparse on its first error."""
    for result in check_start(options, replicas, workers, headless, rust_front_end=rust_front_end):
        if result.level is Level.ERROR:
            exit_usage_error(ConfigError(result.text))
        if result.level is Level.WARNING:
            logger.warning("%s", result.text)


def check_start(
    options: OmniConfig, replicas: int, workers: int, headless: bool, *, rust_front_end: bool = False
) -> Iterator[CheckResult]:
    """Check whether this machine has what a checked command line needs, with so many worker processes of vLLM."""
    yield check_node_files(replicas) if headless else check_head_files(replicas)
    if headless and replicas:
        yield from _ports(options, replicas)
    if replicas or workers or rust_front_end:
        yield check_socket_folder()
    if workers:
        yield check_shared_memory(workers)


def check_node_files(replicas: int) -> CheckResult:
    try:
        needed = check_limits(replicas)
    except ConfigError as error:
        return CheckResult(Level.ERROR, str(error))
    return CheckResult(Level.OK, f"open files: the limit allows the {needed} that are needed")


def check_head_files(replicas: int) -> CheckResult:
    """An error if the limit does not do for the replicas, a warning if it leaves clients few connections."""
    try:
        left = files_beside_own(replicas)
    except ConfigError as error:
        return CheckResult(Level.ERROR, str(error))
    if left >= _CONNECTIONS_OF_CLIENTS:
        return CheckResult(Level.OK, "open files: the limit allows those of a head and of its clients")
    return CheckResult(
        Level.WARNING,
        f"open files: the limit leaves a head {left} for connections of its clients, and further ones wait: raise it "
        "(ulimit -n, or LimitNOFILE= of systemd)",
    )


def check_socket_folder() -> CheckResult:
    try:
        base = socket_base()
        with tempfile.TemporaryDirectory(dir=base):
            pass
    except OSError as error:
        return CheckResult(Level.ERROR, f"sockets: {error}: name a writable folder with {_SHORTER}")
    if len(base) > LONGEST_BASE:
        return CheckResult(
            Level.ERROR,
            f"sockets: the path {base} has {len(base)} characters, and the limit is {LONGEST_BASE}: name a shorter "
            f"path with {_SHORTER}",
        )
    if len(base) > LONGEST_BASE_OF_FOLDERS:
        return CheckResult(
            Level.WARNING,
            f"sockets: the path {base} has more than {LONGEST_BASE_OF_FOLDERS} characters, so sockets of killed "
            f"processes are not removed: name a shorter path with {_SHORTER}",
        )
    return CheckResult(Level.OK, f"sockets: the folder {base} can be used")


def check_shared_memory(workers: int) -> CheckResult:
    """A warning if /dev/shm has too little for these workers."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return CheckResult(Level.UNKNOWN, f"shared memory: {SHARED_MEMORY}: {error.strerror}")
    free, wanted = found.f_bavail * found.f_frsize, max(LEAST_SHARED_MEMORY, workers * SHARED_MEMORY_PER_WORKER)
    state = f"shared memory: {SHARED_MEMORY} has {free >> 20} MiB free"
    if free >= wanted:
        return CheckResult(Level.OK, state)
    return CheckResult(
        Level.WARNING,
        f"{state}, and {workers} worker processes need {wanted >> 20} MiB: give a container more (--shm-size of "
        "Docker, a volume of medium Memory in Kubernetes)",
    )


def _ports(options: OmniConfig, replicas: int) -> Iterator[CheckResult]:
    """Bind as many of `--omni-replica-ports` as replicas need, and give them back."""
    if options.replica_ports is None:
        return
    try:
        address = bind_address(options, headless=True)
    except ConfigError:
        # The head's name may not resolve until the head is there, and the address to bind depends on it.
        return
    try:
        close_all(listen_on_ports(address, PortRange.parse(options.replica_ports), REPLICA_PORTS * replicas))
    except ConfigError as error:
        yield CheckResult(Level.ERROR, f"argument {error}")
    else:
        yield CheckResult(Level.OK, f"ports: enough of {options.replica_ports} are free on {address}")
