"""The sample of decisions in the log."""

import logging
from typing import Any, cast

import pytest

from vllm_omni_plugin.balancing import Candidate, Decision, RandomBalancer
from vllm_omni_plugin.orchestrator.pool.decision_log import DecisionLog, logger
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolMember, StagePool
from vllm_omni_plugin.replicas.client.stage_client import StageClient

REPLICAS = [PoolMember(replica_id, 0) for replica_id in range(12)]
DECISION = Decision(1, "match", (Candidate(0, 2.0), Candidate(1, 0.123456, 48)), fallback="no-events")


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.DEBUG, logger.name)
    return caplog


def test_a_line_says_where_a_request_goes_and_why(log: pytest.LogCaptureFixture) -> None:
    DecisionLog("kv-aware").note(DECISION, REPLICAS, "a")
    assert log.messages[0] == (
        "Request a goes to replica 0.1: policy kv-aware, reason match, fallback no-events, candidates "
        "0.1=0.1235 (48 tokens matched), 0.0=2 (0 tokens matched)"
    )


def test_the_first_of_every_so_many_decisions_is_logged(log: pytest.LogCaptureFixture) -> None:
    decisions = DecisionLog("p", every=3)
    for name in "abcdefg":
        decisions.note(DECISION, REPLICAS, name)
    assert [message.split()[1] for message in log.messages] == ["a", "d", "g"]


def test_a_large_fleet_takes_no_longer_a_line(log: pytest.LogCaptureFixture) -> None:
    many = tuple(Candidate(position, float(-position)) for position in range(12))
    DecisionLog("p").note(Decision(11, "least-load", many), REPLICAS, "a")
    assert log.messages[0].count("tokens matched") == 8
    assert log.messages[0].endswith("0.4=-4 (0 tokens matched) and 4 more")


@pytest.mark.parametrize("candidates", [(Candidate(99, 1.0),), (3,), None, (Candidate(0, "x"), Candidate(1, 1.0))])
def test_candidates_that_make_no_sense_cost_no_request(log: pytest.LogCaptureFixture, candidates: Any) -> None:
    DecisionLog("p").note(Decision(1, "match", candidates), REPLICAS, "a")
    assert "candidates that cannot be told" in log.messages[0]


def test_nothing_is_written_or_counted_above_debug(caplog: pytest.LogCaptureFixture) -> None:
    pool = StagePool(0, RandomBalancer())
    pool.serve(pool.add(), cast(StageClient, object()), "in", "out")
    caplog.set_level(logging.INFO, logger.name)
    pool.decide({"request_id": "a"})
    assert caplog.messages == []
    caplog.set_level(logging.DEBUG, logger.name)
    pool.decide({"request_id": "b"})
    assert caplog.messages[0].startswith("Request b ")
