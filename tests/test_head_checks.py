"""What a node is told about itself and its head before it loads a model: only what is certain ends it."""

import logging
from collections.abc import Iterator

import pytest

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator import HeadInfo, HeadQueryResult
from vllm_omni_plugin.errors import RefusedByHeadError
from vllm_omni_plugin.integration.checks import head_checks
from vllm_omni_plugin.integration.checks.check_result import CheckResult, Level
from vllm_omni_plugin.integration.checks.head_checks import (
    check_head,
    check_model,
    require_fitting_head,
    require_same_model,
)

FINGERPRINT = {"model": "a", "dtype": "float32"}
FACTS = HeadInfo(0.0, [0, 2], FINGERPRINT)
OTHER_STAGE = HeadQueryResult(HeadInfo(0.0, [1], FINGERPRINT))


OK, UNKNOWN, WARNING, ERROR = Level.OK, Level.UNKNOWN, Level.WARNING, Level.ERROR
SILENT = HeadQueryResult(HeadInfo(0.0, [], {}))


def all_results(answer: HeadQueryResult, fingerprint: dict[str, str] | None) -> Iterator[CheckResult]:
    yield from check_head(answer, 0)
    if fingerprint is not None:
        yield from check_model(answer, 0, fingerprint)


@pytest.mark.parametrize(
    ("answer", "fingerprint", "expected", "texts"),
    [
        pytest.param(HeadQueryResult(FACTS), FINGERPRINT, [OK, OK, OK], ["accepts this secret"], id="all alike"),
        pytest.param(HeadQueryResult(FACTS), None, [OK, OK], [], id="no model to compare"),
        pytest.param(HeadQueryResult(problem="nobody there"), FINGERPRINT, [UNKNOWN], [], id="head away"),
        pytest.param(
            HeadQueryResult(problem="refused secret", refused=True),
            FINGERPRINT,
            [ERROR],
            [
                "give both ends the same --omni-secret-file (sha256sum compares files), or none",
                "see that the port is the head's master port",
            ],
            id="secret",
        ),
        pytest.param(HeadQueryResult(FACTS, clock_ahead=-5.0), None, [OK, OK], [], id="clocks nearly alike"),
        pytest.param(HeadQueryResult(FACTS, clock_ahead=-5.1), None, [OK, WARNING], ["NTP"], id="clock behind"),
        pytest.param(
            HeadQueryResult(FACTS, clock_ahead=61.4), None, [OK, WARNING], ["61 s ahead of the head's"], id="ahead"
        ),
        pytest.param(SILENT, FINGERPRINT, [OK, OK, UNKNOWN], ["accepts this node"], id="tells nothing"),
        pytest.param(
            HeadQueryResult(FACTS),
            {**FINGERPRINT, "dtype": "half"},
            [OK, OK, WARNING],
            ["another generation than the head's (dtype: head has float32, replica half): only heads of its own kind"],
            id="generation",
        ),
        pytest.param(
            HeadQueryResult(FACTS),
            {"model": "b", "dtype": "half"},
            [OK, OK, ERROR],
            ["model: head has a, replica b", "start head and node with the same model and flags"],
            id="model",
        ),
        pytest.param(
            OTHER_STAGE,
            FINGERPRINT,
            [OK, OK, ERROR],
            ["stage: the head has 1, replica 0: give one of the head's with --omni-stage-id"],
            id="stage",
        ),
        pytest.param(OTHER_STAGE, None, [OK, OK, ERROR], [], id="stage, no model to compare"),
    ],
)
def test_only_a_certain_difference_is_an_error_and_is_told_with_what_to_do(
    answer: HeadQueryResult, fingerprint: dict[str, str] | None, expected: list[Level], texts: list[str]
) -> None:
    results = list(all_results(answer, fingerprint))
    assert [result.level for result in results] == expected
    assert [text for text in texts if text not in "\n".join(result.text for result in results)] == []


def compare_and_start() -> None:
    """What a node does about its head before it starts an engine."""
    require_same_model(require_fitting_head("tcp://h:1", OmniConfig(), ["h/0"]), 0, FINGERPRINT)


@pytest.mark.parametrize(
    ("answer", "warning"),
    [
        (HeadQueryResult(FACTS), None),
        (HeadQueryResult(problem="no coordinator answers"), None),
        (SILENT, None),
        (HeadQueryResult(FACTS, clock_ahead=60.0), "60 s ahead"),
        (HeadQueryResult(HeadInfo(0.0, [0], {**FINGERPRINT, "dtype": "half"})), "of another generation"),
        # It may be a proxy whose head starts later.
        (HeadQueryResult(problem="refused secret", refused=True), "secret: refused secret: give both ends the same"),
    ],
)
def test_a_node_goes_on_when_nothing_is_wrong_for_certain(
    answer: HeadQueryResult, warning: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(head_checks, "query_head", lambda *_: answer)
    compare_and_start()
    told = [record for record in caplog.records if record.levelno > logging.INFO]
    assert [record.levelname for record in told] == ([] if warning is None else ["WARNING"])
    assert warning is None or warning in told[0].getMessage()


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (HeadQueryResult(HeadInfo(0.0, [0], {"model": "b"})), "model: head has b, replica a"),
        (HeadQueryResult(HeadInfo(0.0, [1], {})), "the head has 1, replica 0"),
    ],
)
def test_a_node_that_the_head_would_refuse_ends(
    answer: HeadQueryResult, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_checks, "query_head", lambda *_: answer)
    with pytest.raises(RefusedByHeadError, match=why):
        compare_and_start()
