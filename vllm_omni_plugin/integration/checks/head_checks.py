"""Compares a node with its head before the node loads a model."""

from collections.abc import Iterator, Mapping, Sequence

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator import HeadQueryResult, query_head
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import RefusedByHeadError
from vllm_omni_plugin.integration.checks.check_result import CheckResult, Level
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.replica_server.attached_heads import differences, is_other_generation

logger = init_logger(__name__)

LARGEST_CLOCK_DIFFERENCE_S = 5.0
"""Only logs, events and traces depend on it."""


def query_head_for_node(coordinator: str, options: OmniConfig, host_slots: Sequence[str] = ()) -> HeadQueryResult:
    """Query the head for a node with these options, from `with_secret`. Blocks for up to 1.5 s."""
    secrets = Secrets.from_file(options.secret_file) if options.secret_file else None
    return query_head(coordinator, options.stage_id, secrets, host_slots)


def require_fitting_head(coordinator: str, options: OmniConfig, host_slots: Sequence[str]) -> HeadQueryResult:
    """Query the head as `query_head_for_node` does, log the results, and return the answer for `require_same_model`.

    Raises RefusedByHeadError if the head would refuse the node's replicas, whatever their model is. A head that does
    not answer is no error, since it may start later.
    """
    answer = query_head_for_node(coordinator, options, host_slots)
    results = check_head(answer, options.stage_id)
    if answer.refused:
        # No error, either: a proxy whose head starts later ends connections as a head with another secret does.
        logger.warning("Before the start: %s", next(results).text)
    else:
        _refuse_errors(results)
    return answer


def require_same_model(answer: HeadQueryResult, stage_id: int, fingerprint: Mapping[str, str]) -> None:
    """Raise RefusedByHeadError if the node has another model than the head in the answer."""
    _refuse_errors(check_model(answer, stage_id, fingerprint))


def _refuse_errors(results: Iterator[CheckResult]) -> None:
    """A node does not start after an error; warnings are logged."""
    for result in results:
        if result.level is Level.ERROR:
            raise RefusedByHeadError(result.text)
        _log(result)


def _log(result: CheckResult) -> None:
    log = logger.info if result.level in (Level.OK, Level.UNKNOWN) else logger.warning
    log("Before the start: %s", result.text)


def check_head(answer: HeadQueryResult, stage_id: int) -> Iterator[CheckResult]:
    """Compare what needs no model: an answer, the secret, the clock, the stage. Only secret and stage are errors."""
    if answer.refused:
        yield CheckResult(
            Level.ERROR,
            f"secret: {answer.problem}: give both ends the same --omni-secret-file (sha256sum compares files), or "
            "none; see that the port is the head's master port",
        )
    elif answer.info is None:
        yield CheckResult(Level.UNKNOWN, f"head: {answer.problem}; secret, clock and model are not compared with it")
    else:
        # A head without a secret does not tell its stages.
        accepted = "secret" if answer.info.stages else "node"
        yield CheckResult(Level.OK, f"head: it answers and accepts this {accepted}")
        yield _clock(answer.clock_ahead)
        if answer.info.stages and stage_id not in answer.info.stages:
            theirs = ", ".join(map(str, answer.info.stages))
            yield CheckResult(
                Level.ERROR,
                f"stage: the head has {theirs}, replica {stage_id}: give one of the head's with --omni-stage-id",
            )


def check_model(answer: HeadQueryResult, stage_id: int, fingerprint: Mapping[str, str]) -> Iterator[CheckResult]:
    """Compare models: other weights of the same kind (another generation) are a warning, another model an error."""
    if answer.info is None:
        return
    if not answer.info.stages:
        yield CheckResult(Level.UNKNOWN, "model: not compared, because a head without a secret does not tell its model")
    elif stage_id in answer.info.stages:
        differing = differences(answer.info.fingerprint, fingerprint)
        if differing and is_other_generation(answer.info.fingerprint, fingerprint):
            yield CheckResult(
                Level.WARNING,
                f"model: it is of another generation than the head's ({'; '.join(differing)}): only heads of its own "
                "kind use it",
            )
        elif differing:
            yield CheckResult(
                Level.ERROR,
                f"model: it differs from the head's ({'; '.join(differing)}): start head and node with the same "
                "model and flags",
            )
        else:
            yield CheckResult(Level.OK, "model: same as the head's")


def _clock(ahead: float) -> CheckResult:
    if abs(ahead) <= LARGEST_CLOCK_DIFFERENCE_S:
        return CheckResult(Level.OK, "clock: same as the head's")
    way = "ahead of" if ahead > 0 else "behind"
    return CheckResult(
        Level.WARNING,
        f"clock: it is {abs(ahead):.0f} s {way} the head's, so times in their logs and events do not match: "
        "set both by NTP",
    )
