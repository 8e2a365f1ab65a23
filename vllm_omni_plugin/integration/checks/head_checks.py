"""A node compared with the head that it is to join, before it loads a model."""

from collections.abc import Iterator, Mapping

from vllm_omni_plugin.coordinator import HeadAnswer, ask_head
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import RefusedByHeadError
from vllm_omni_plugin.integration.checks.finding import Finding, Level
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.server.attached_heads import differences

logger = init_logger(__name__)

LARGEST_CLOCK_DIFFERENCE_S = 5.0
"""Nothing depends on it but what people read: logs, events and traces."""


def ask_or_refuse(coordinator: str, stage_id: int, secrets: Secrets | None) -> HeadAnswer:
    """Ask the head of a node before anything else is done, as it takes 2 s at most. Blocks.

    What cannot be compared, as the head may come later, is no error.

    Args:
        coordinator: its ZMQ address.
        stage_id: the stage that the node will serve.
        secrets: of the fleet.

    Returns:
        Its answer, for `refuse_other_model`.

    Raises:
        RefusedByHeadError: the head would refuse the node's replicas, whatever their model is.
    """
    answer = ask_head(coordinator, stage_id, secrets)
    _refuse_errors(head_findings(answer, stage_id))
    return answer


def refuse_other_model(answer: HeadAnswer, stage_id: int, fingerprint: Mapping[str, str]) -> None:
    """Compare the node's fingerprint with that in the head's answer. Raises RefusedByHeadError if they differ."""
    _refuse_errors(model_findings(answer, stage_id, fingerprint))


def _refuse_errors(findings: Iterator[Finding]) -> None:
    for finding in findings:
        if finding.level is Level.ERROR:
            raise RefusedByHeadError(finding.text)
        log = logger.warning if finding.level is Level.WARNING else logger.info
        log("Before the start: %s", finding.text)


def head_findings(answer: HeadAnswer, stage_id: int) -> Iterator[Finding]:
    """What the head's answer to the question about a stage says about a node, whatever its model is."""
    if answer.refused:
        yield Finding(
            Level.ERROR,
            f"secret: {answer.trouble}: give both ends the same --omni-secret-file (sha256sum compares files), or "
            "none; see that the port is the head's master port",
        )
    elif answer.facts is None:
        yield Finding(Level.UNKNOWN, f"head: {answer.trouble}; secret, clock and model are not compared with it")
    else:
        # A head without a secret names no stages.
        accepted = "secret" if answer.facts.stages else "node"
        yield Finding(Level.OK, f"head: it answers, so it is reached and accepts this {accepted}")
        yield _clock(answer.clock_ahead)
        if answer.facts.stages and stage_id not in answer.facts.stages:
            theirs = ", ".join(map(str, answer.facts.stages))
            yield Finding(
                Level.ERROR,
                f"stage: the head has {theirs}, replica {stage_id}: give one of the head's with --omni-stage-id",
            )


def model_findings(answer: HeadAnswer, stage_id: int, fingerprint: Mapping[str, str]) -> Iterator[Finding]:
    """What the head's answer to the question about a stage says about a node's fingerprint."""
    if answer.facts is None:
        return
    if not answer.facts.stages:
        yield Finding(Level.UNKNOWN, "model: the head does not say what it serves, as without a secret it never does")
    elif stage_id in answer.facts.stages:
        if differing := differences(answer.facts.fingerprint, fingerprint):
            yield Finding(
                Level.ERROR,
                f"model: it would answer differently ({'; '.join(differing)}): start head and node with the same model "
                "and flags",
            )
        else:
            yield Finding(Level.OK, "model: as the head's")


def _clock(ahead: float) -> Finding:
    if abs(ahead) <= LARGEST_CLOCK_DIFFERENCE_S:
        return Finding(Level.OK, "clock: as the head's")
    way = "ahead of" if ahead > 0 else "behind"
    return Finding(
        Level.WARNING,
        f"clock: this machine's is {abs(ahead):.0f} s {way} the head's, so their logs and events do not fit together: "
        "set both by NTP",
    )
