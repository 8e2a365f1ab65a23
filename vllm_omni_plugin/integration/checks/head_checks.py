"""A node compared with the head that it is to join, before it loads a model."""

from collections.abc import Iterator, Mapping

from vllm_omni_plugin.coordinator import Facts, HeadAnswer, ask_head
from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.integration.checks.finding import Finding, Level
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.server.attached_heads import differences
from vllm_omni_plugin.replicas.server.server_settings import ServerSettings

logger = init_logger(__name__)

LARGEST_CLOCK_DIFFERENCE_S = 5.0
"""Nothing depends on it but what people read: logs, events and traces."""


def refuse_unlike_head(settings: ServerSettings) -> None:
    """Compare this node with its head. What cannot be compared, as the head may come later, is no error. Blocks.

    Raises:
        OmniError: the head would refuse its replicas.
    """
    answer = ask_head(settings.coordinator_addr, settings.stage_id, settings.secrets)
    for finding in head_findings(answer, settings.stage_id, settings.fingerprint):
        if finding.level is Level.ERROR:
            raise OmniError(finding.text)
        log = logger.warning if finding.level is Level.WARNING else logger.info
        log("Before the start: %s", finding.text)


def head_findings(answer: HeadAnswer, stage_id: int, fingerprint: Mapping[str, str] | None) -> Iterator[Finding]:
    """What the head's answer says about a node.

    Args:
        answer: to the question about its stage.
        stage_id: the stage.
        fingerprint: of the node; None: not to be compared.
    """
    if answer.refused:
        yield Finding(Level.ERROR, f"secret: {answer.trouble}: copy the head's file here (sha256sum compares them)")
    elif answer.facts is None:
        yield Finding(Level.UNKNOWN, f"head: {answer.trouble}; secret, clock and model are not compared with it")
    else:
        yield Finding(Level.OK, "head: it answers, so it is reached and accepts this secret")
        yield _clock(answer.clock_ahead)
        if fingerprint is not None:
            yield _model(answer.facts, stage_id, fingerprint)


def _clock(ahead: float) -> Finding:
    if abs(ahead) <= LARGEST_CLOCK_DIFFERENCE_S:
        return Finding(Level.OK, "clock: as the head's")
    way = "ahead of" if ahead > 0 else "behind"
    return Finding(
        Level.WARNING,
        f"clock: this machine's is {abs(ahead):.0f} s {way} the head's, so their logs and events do not fit together: "
        "set both by NTP",
    )


def _model(facts: Facts, stage_id: int, fingerprint: Mapping[str, str]) -> Finding:
    if not facts.stages:
        return Finding(Level.UNKNOWN, "model: the head does not say what it serves, as without a secret it never does")
    if stage_id not in facts.stages:
        theirs = ", ".join(map(str, facts.stages))
        return Finding(
            Level.ERROR,
            f"stage: the head has {theirs}, replica {stage_id}: give one of the head's with --omni-stage-id",
        )
    if differing := differences(facts.fingerprint, fingerprint):
        return Finding(
            Level.ERROR,
            f"model: it would answer differently ({'; '.join(differing)}): start head and node with the same model "
            "and flags",
        )
    return Finding(Level.OK, "model: as the head's")
