"""What a node is told about itself and its head before it loads a model: only what is certain ends it."""

import logging
from collections.abc import Iterator
from typing import Any

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


def levels(results: Any) -> list[Level]:
    return [result.level for result in results]


def all_results(answer: HeadQueryResult, stage_id: int, fingerprint: dict[str, str] | None) -> Iterator[CheckResult]:
    yield from check_head(answer, stage_id)
    if fingerprint is not None:
        yield from check_model(answer, stage_id, fingerprint)


@pytest.mark.parametrize(
    ("answer", "fingerprint", "expected"),
    [
        pytest.param(HeadQueryResult(FACTS), FINGERPRINT, [Level.OK] * 3, id="all alike"),
        pytest.param(HeadQueryResult(FACTS), None, [Level.OK] * 2, id="no model to compare"),
        pytest.param(HeadQueryResult(problem="nobody there"), FINGERPRINT, [Level.UNKNOWN], id="head away"),
        pytest.param(HeadQueryResult(problem="no", refused=True), FINGERPRINT, [Level.ERROR], id="secret"),
        pytest.param(HeadQueryResult(FACTS, clock_ahead=-5.0), None, [Level.OK] * 2, id="clocks nearly alike"),
        pytest.param(HeadQueryResult(FACTS, clock_ahead=-5.1), None, [Level.OK, Level.WARNING], id="clock behind"),
        pytest.param(
            HeadQueryResult(HeadInfo(0.0, [], {})), FINGERPRINT, [Level.OK, Level.OK, Level.UNKNOWN], id="tells nothing"
        ),
        pytest.param(
            HeadQueryResult(FACTS), {**FINGERPRINT, "dtype": "half"}, [Level.OK, Level.OK, Level.ERROR], id="model"
        ),
        pytest.param(OTHER_STAGE, FINGERPRINT, [Level.OK, Level.OK, Level.ERROR], id="stage"),
        pytest.param(OTHER_STAGE, None, [Level.OK, Level.OK, Level.ERROR], id="stage, no model to compare"),
    ],
)
def test_only_a_certain_difference_from_the_head_is_an_error(
    answer: HeadQueryResult, fingerprint: dict[str, str] | None, expected: list[Level]
) -> None:
    assert levels(all_results(answer, 0, fingerprint)) == expected


@pytest.mark.parametrize(
    ("answer", "stage_id", "texts"),
    [
        pytest.param(
            HeadQueryResult(FACTS),
            2,
            ("dtype: head has float32, replica half", "start head and node with the same model and flags"),
            id="model",
        ),
        pytest.param(
            HeadQueryResult(problem="refused secret", refused=True),
            0,
            (
                "give both ends the same --omni-secret-file (sha256sum compares files), or none",
                "see that the port is the head's master port",
            ),
            id="secret",
        ),
        pytest.param(
            OTHER_STAGE,
            0,
            ("stage: the head has 1, replica 0: give one of the head's with --omni-stage-id",),
            id="stage",
        ),
        pytest.param(HeadQueryResult(FACTS, clock_ahead=61.4), 0, ("61 s ahead of the head's", "NTP"), id="clock"),
        pytest.param(HeadQueryResult(FACTS), 0, ("head: it answers and accepts this secret",), id="same secret"),
        pytest.param(
            HeadQueryResult(HeadInfo(0.0, [], {})), 0, ("head: it answers and accepts this node",), id="no secret"
        ),
    ],
)
def test_what_differs_is_named_with_what_to_do(answer: HeadQueryResult, stage_id: int, texts: tuple[str, ...]) -> None:
    told = "\n".join(result.text for result in all_results(answer, stage_id, {**FINGERPRINT, "dtype": "half"}))
    assert [text for text in texts if text not in told] == []


def compare_and_start() -> None:
    """What a node does about its head before it starts an engine."""
    require_same_model(require_fitting_head("tcp://h:1", OmniConfig(), ["h/0"]), 0, FINGERPRINT)


@pytest.mark.parametrize(
    ("answer", "warning"),
    [
        (HeadQueryResult(FACTS), None),
        (HeadQueryResult(problem="no coordinator answers"), None),
        (HeadQueryResult(HeadInfo(0.0, [], {})), None),
        (HeadQueryResult(FACTS, clock_ahead=60.0), "60 s ahead"),
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
