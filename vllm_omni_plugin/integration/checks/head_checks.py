"""A node compared with the head that it is to join, before it loads a model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator import HeadQueryResult, query_head
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import ConfigError, RefusedByHeadError
from vllm_omni_plugin.integration.checks.check_result import CheckResult, Level
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.links.replica_ports import (
    REPLICA_PORTS,
    Listener,
    PortRange,
    close_all,
    listen_on_ports,
)
from vllm_omni_plugin.replicas.server.attached_heads import differences

logger = init_logger(__name__)

LARGEST_CLOCK_DIFFERENCE_S = 5.0
"""Nothing depends on it but what people read: logs, events and traces."""


def query_head_for_node(coordinator: str, options: OmniConfig, address: str, replicas: int) -> HeadQueryResult:
    """Ask the head of a node, and listen meanwhile where its replicas would, if there is place. Blocks for 2 s at most,
    and for 2 s more where the head does not reach the node.

    Args:
        coordinator: the head's ZMQ address.
        options: of the node, secured.
        address: where its replicas listen.
        replicas: how many there are.
    """
    secrets = Secrets.from_file(options.secret_file) if options.secret_file else None
    with _listening(options, address, REPLICA_PORTS * replicas) as listeners:
        sockets = {listener.address: listener.socket for listener in listeners}
        return query_head(coordinator, options.stage_id, secrets, sockets)


@contextmanager
def _listening(options: OmniConfig, address: str, count: int) -> Iterator[Sequence[Listener]]:
    listeners: Sequence[Listener] = ()
    # What is wrong is told by `check_start`.
    with suppress(ConfigError):
        ports = None if options.replica_ports is None else PortRange.parse(options.replica_ports)
        listeners = listen_on_ports(address, ports, count)
    try:
        yield listeners
    finally:
        close_all(listeners)


def require_fitting_head(coordinator: str, options: OmniConfig, address: str, replicas: int) -> HeadQueryResult:
    """Ask the head of a node before anything else is done; arguments as of `ask`.

    What cannot be compared, as the head may come later, is no error, nor are ports that it does not reach yet.

    Returns:
        Its answer, for `require_same_model`.

    Raises:
        RefusedByHeadError: the head would refuse the node's replicas, whatever their model is.
    """
    answer = query_head_for_node(coordinator, options, address, replicas)
    _refuse_errors(check_head(answer, options.stage_id))
    for finding in check_reachability(answer):
        _log(finding)
    return answer


def require_same_model(answer: HeadQueryResult, stage_id: int, fingerprint: Mapping[str, str]) -> None:
    """Compare the node's fingerprint with that in the head's answer. Raises RefusedByHeadError if they differ."""
    _refuse_errors(check_model(answer, stage_id, fingerprint))


def _refuse_errors(findings: Iterator[CheckResult]) -> None:
    for finding in findings:
        if finding.level is Level.ERROR:
            raise RefusedByHeadError(finding.text)
        _log(finding)


def _log(finding: CheckResult) -> None:
    log = logger.info if finding.level in (Level.OK, Level.UNKNOWN) else logger.warning
    log("Before the start: %s", finding.text)


def check_head(answer: HeadQueryResult, stage_id: int) -> Iterator[CheckResult]:
    """What the head's answer to the question about a stage says about a node, whatever its model is."""
    if answer.refused:
        yield CheckResult(
            Level.ERROR,
            f"secret: {answer.problem}: give both ends the same --omni-secret-file (sha256sum compares files), or "
            "none; see that the port is the head's master port",
        )
    elif answer.info is None:
        yield CheckResult(Level.UNKNOWN, f"head: {answer.problem}; secret, clock and model are not compared with it")
    else:
        # A head without a secret names no stages.
        accepted = "secret" if answer.info.stages else "node"
        yield CheckResult(Level.OK, f"head: it answers, so it is reached and accepts this {accepted}")
        yield _clock(answer.clock_ahead)
        if answer.info.stages and stage_id not in answer.info.stages:
            theirs = ", ".join(map(str, answer.info.stages))
            yield CheckResult(
                Level.ERROR,
                f"stage: the head has {theirs}, replica {stage_id}: give one of the head's with --omni-stage-id",
            )


def check_reachability(answer: HeadQueryResult) -> Iterator[CheckResult]:
    """What the head's answer says about the node's ports: whether heads would get to its replicas."""
    if answer.info is None or not answer.listening:
        return
    if answer.unreached is None:
        yield CheckResult(
            Level.UNKNOWN,
            "ports: the head does not say whether it reaches this node, as it is of an older version, without a "
            "secret, or asked by many",
        )
    elif answer.unreached:
        yield CheckResult(
            Level.ERROR,
            f"ports: the head does not reach {_by_reason(answer.unreached)}: open the ports of --omni-replica-ports "
            "(any free ones are taken without it) to all heads, or give an address that they reach with "
            "--omni-replica-address",
        )
    else:
        yield CheckResult(Level.OK, f"ports: the head reaches {_places(answer.listening)}")


def _by_reason(unreached: Mapping[str, str]) -> str:
    reasons: dict[str, list[str]] = {}
    for address, why in unreached.items():
        reasons.setdefault(why, []).append(address)
    return ", ".join(f"{_places(addresses)} ({why})" for why, addresses in reasons.items())


def _places(addresses: Sequence[str]) -> str:
    """Addresses of one host, in short."""
    host = addresses[0].rpartition(":")[0]
    return f"{host.removeprefix('tcp://')} port {', '.join(address.rpartition(':')[2] for address in addresses)}"


def check_model(answer: HeadQueryResult, stage_id: int, fingerprint: Mapping[str, str]) -> Iterator[CheckResult]:
    """What the head's answer to the question about a stage says about a node's fingerprint."""
    if answer.info is None:
        return
    if not answer.info.stages:
        yield CheckResult(Level.UNKNOWN, "model: the head has no secret, and then does not tell what it serves")
    elif stage_id in answer.info.stages:
        if differing := differences(answer.info.fingerprint, fingerprint):
            yield CheckResult(
                Level.ERROR,
                f"model: it would answer differently ({'; '.join(differing)}): start head and node with the same model "
                "and flags",
            )
        else:
            yield CheckResult(Level.OK, "model: as the head's")


def _clock(ahead: float) -> CheckResult:
    if abs(ahead) <= LARGEST_CLOCK_DIFFERENCE_S:
        return CheckResult(Level.OK, "clock: as the head's")
    way = "ahead of" if ahead > 0 else "behind"
    return CheckResult(
        Level.WARNING,
        f"clock: this machine's is {abs(ahead):.0f} s {way} the head's, so their logs and events do not fit together: "
        "set both by NTP",
    )
