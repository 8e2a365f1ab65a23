"""What replicas take of this machine, looked at before any of them starts. Takes milliseconds."""

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
from vllm_omni_plugin.replicas.server.descriptor_limits import check_limits, files_beside_own

logger = init_logger(__name__)

_CONNECTIONS_OF_CLIENTS = 1024
"""So few descriptors are all that many systems allow by default."""
_SHORTER = "TMPDIR or VLLM_RPC_BASE_PATH"
SHARED_MEMORY = "/dev/shm"
SHARED_MEMORY_OF_A_WORKER = 64 * 2**20
"""What a container has by default, and which several workers of one engine use up: queues of vLLM's, and NCCL's."""


def check_or_exit(options: OmniConfig, replicas: int, workers: int, headless: bool) -> None:
    """End the process as argparse does if its replicas could not start for sure; warn of what may harm them.

    Args:
        options: ours in the command line, which have been checked.
        replicas: how many this process will run itself.
        workers: how many worker processes vLLM will start for them.
        headless: whether it is a node.
    """
    for finding in check_start(options, replicas, workers, headless):
        if finding.level is Level.ERROR:
            exit_usage_error(ConfigError(finding.text))
        if finding.level is Level.WARNING:
            logger.warning("%s", finding.text)


def check_start(options: OmniConfig, replicas: int, workers: int, headless: bool) -> Iterator[CheckResult]:
    """What is found for a command line; arguments as of `check_or_exit`."""
    yield check_node_files(replicas) if headless else check_head_files(replicas)
    if headless:
        yield from _ports(options, replicas)
    if replicas:
        yield check_socket_folder()
    if workers:
        yield check_shared_memory(workers)


def check_node_files(replicas: int) -> CheckResult:
    """Whether a node may open as many files as so many replicas need."""
    try:
        needed = check_limits(replicas)
    except ConfigError as error:
        return CheckResult(Level.ERROR, str(error))
    return CheckResult(Level.OK, f"open files: the limit allows the {needed} that are needed here")


def check_head_files(replicas: int) -> CheckResult:
    """Whether a head may open as many files as so many replicas of its own need, and its clients."""
    try:
        left = files_beside_own(replicas)
    except ConfigError as error:
        return CheckResult(Level.ERROR, str(error))
    if left >= _CONNECTIONS_OF_CLIENTS:
        return CheckResult(Level.OK, "open files: the limit allows those of a head and of its clients")
    return CheckResult(
        Level.WARNING,
        f"open files: the limit leaves a head {left} for connections of its clients, and others wait: raise it "
        "(ulimit -n, or LimitNOFILE= of systemd)",
    )


def check_socket_folder() -> CheckResult:
    """Whether sockets can lie where this process and its engines will put theirs."""
    try:
        base = socket_base()
        with tempfile.TemporaryDirectory(dir=base):
            pass
    except OSError as error:
        return CheckResult(Level.ERROR, f"sockets: {error}: name a folder that can be written to with {_SHORTER}")
    if len(base) > LONGEST_BASE:
        return CheckResult(
            Level.ERROR,
            f"sockets: {base} has {len(base)} characters, and a socket there may have {LONGEST_BASE}: name a shorter "
            f"path with {_SHORTER}",
        )
    if len(base) > LONGEST_BASE_OF_FOLDERS:
        return CheckResult(
            Level.WARNING,
            f"sockets: {base} has more than {LONGEST_BASE_OF_FOLDERS} characters, so those of processes that are "
            f"killed stay there: name a shorter path with {_SHORTER}",
        )
    return CheckResult(Level.OK, f"sockets: they can lie in {base}")


def check_shared_memory(workers: int) -> CheckResult:
    """Whether the shared memory suffices for so many worker processes of vLLM's."""
    try:
        found = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        return CheckResult(Level.UNKNOWN, f"shared memory: {SHARED_MEMORY}: {error.strerror}")
    free, wanted = found.f_bavail * found.f_frsize, workers * SHARED_MEMORY_OF_A_WORKER
    told = f"shared memory: {SHARED_MEMORY} has {free >> 20} MiB free"
    if free >= wanted:
        return CheckResult(Level.OK, told)
    return CheckResult(
        Level.WARNING,
        f"{told}, and {workers} worker processes may take {wanted >> 20} MiB: give a container more (--shm-size of "
        "Docker, a volume of medium Memory in Kubernetes)",
    )


def _ports(options: OmniConfig, replicas: int) -> Iterator[CheckResult]:
    if options.replica_ports is None:
        return
    try:
        address = bind_address(options, headless=True)
    except ConfigError:
        # The head's name may come with the head, and only then is it known where to listen.
        return
    try:
        close_all(listen_on_ports(address, PortRange.parse(options.replica_ports), REPLICA_PORTS * replicas))
    except ConfigError as error:
        yield CheckResult(Level.ERROR, f"argument {error}")
    else:
        yield CheckResult(Level.OK, f"ports: enough of {options.replica_ports} are free on {address}")
