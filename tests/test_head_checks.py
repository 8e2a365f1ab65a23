"""What a node is told about itself and its head before it loads a model: only what is certain ends it."""

import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.free_ports import free_port
from tests.fakes.keeping import Keep
from tests.fakes.secret_files import write_secret
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator import HeadInfo, HeadQueryResult, OmniCoordinator
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import RefusedByHeadError
from vllm_omni_plugin.integration.checks import head_checks
from vllm_omni_plugin.integration.checks.check_result import CheckResult, Level
from vllm_omni_plugin.integration.checks.head_checks import (
    check_head,
    check_model,
    check_reachability,
    query_head_for_node,
    require_fitting_head,
    require_same_model,
)

FINGERPRINT = {"model": "a", "dtype": "float32"}
FACTS = HeadInfo(0.0, [0, 2], FINGERPRINT)
OTHER_STAGE = HeadQueryResult(HeadInfo(0.0, [1], FINGERPRINT))
SECRET = "the secret of the fleet"
SECRETS = Secrets([SECRET])


def node(**other: Any) -> OmniConfig:
    return OmniConfig(master_address="127.0.0.1", master_port=7500, **other)


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


LISTENING = ("tcp://10.0.0.2:41000", "tcp://10.0.0.2:41001", "tcp://10.0.0.2:41002")


@pytest.mark.parametrize(
    ("answer", "level", "said"),
    [
        pytest.param(
            HeadQueryResult(FACTS, listening=LISTENING, unreached={}),
            Level.OK,
            "ports: the head reaches 10.0.0.2 port 41000, 41001, 41002",
            id="reached",
        ),
        pytest.param(
            HeadQueryResult(
                FACTS,
                listening=LISTENING,
                unreached={LISTENING[0]: "no answer", LISTENING[1]: "refused", LISTENING[2]: "no answer"},
            ),
            Level.ERROR,
            "ports: the head does not reach 10.0.0.2 port 41000, 41002 (no answer), 10.0.0.2 port 41001 (refused): "
            "open the ports of --omni-replica-ports (any free ones are taken without it) to all heads, or give an "
            "address that they reach with --omni-replica-address",
            id="not reached",
        ),
        pytest.param(HeadQueryResult(FACTS, listening=LISTENING), Level.UNKNOWN, "of an older version", id="not said"),
        pytest.param(HeadQueryResult(FACTS), None, "", id="not asked"),
        pytest.param(HeadQueryResult(problem="not there", listening=LISTENING), None, "", id="no head"),
    ],
)
def test_ports_that_the_head_does_not_reach_are_told_with_what_to_do(
    answer: HeadQueryResult, level: Level | None, said: str
) -> None:
    results = list(check_reachability(answer))
    assert levels(results) == ([] if level is None else [level])
    assert said in "".join(result.text for result in results)


@pytest.fixture
def head(keep: Keep) -> OmniCoordinator:
    return keep(OmniCoordinator("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", secrets=SECRETS, fingerprints={0: {}}))


@pytest.fixture
def secret_file(tmp_path: Path) -> str:
    return write_secret(tmp_path / "secret", SECRET)


def test_the_ports_that_replicas_would_take_are_those_that_are_asked_about_and_are_free_afterwards(
    head: OmniCoordinator, secret_file: str
) -> None:
    first = free_port()
    options = node(secret_file=secret_file, replica_ports=f"{first}-{first + 30}")
    # Connections that are winding down keep nobody from listening there again.
    answers = [query_head_for_node(head.router_zmq_addr, options, "127.0.0.1", 2) for _ in range(2)]
    assert [len(answer.listening) for answer in answers] == [6, 6]
    assert all(f"tcp://127.0.0.1:{first}" in answer.listening for answer in answers)
    assert [answer.unreached for answer in answers] == [{}, {}]


def test_a_node_of_many_replicas_asks_about_the_first_of_their_ports(head: OmniCoordinator, secret_file: str) -> None:
    answer = query_head_for_node(head.router_zmq_addr, node(secret_file=secret_file), "127.0.0.1", 100)
    assert len(answer.listening) == 32
    assert answer.unreached == {}


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1"])
def test_where_it_cannot_listen_a_node_asks_all_the_same(address: str, head: OmniCoordinator, secret_file: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = node(secret_file=secret_file, replica_ports=f"{port}-{port}")
        answer = query_head_for_node(head.router_zmq_addr, options, address, 1)
    assert answer.info is not None
    assert not answer.listening


def compare_and_start() -> None:
    """What a node does about its head before it starts an engine."""
    require_same_model(require_fitting_head("tcp://h:1", node(), "127.0.0.1", ["h/0"]), 0, FINGERPRINT)


@pytest.mark.parametrize(
    ("answer", "warning"),
    [
        (HeadQueryResult(FACTS), None),
        (HeadQueryResult(problem="no coordinator answers"), None),
        (HeadQueryResult(HeadInfo(0.0, [], {})), None),
        (HeadQueryResult(FACTS, clock_ahead=60.0), "60 s ahead"),
        (
            HeadQueryResult(FACTS, listening=LISTENING, unreached={LISTENING[0]: "no answer within 2 s"}),
            "does not reach 10.0.0.2 port 41000 (no answer within 2 s)",
        ),
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
        (HeadQueryResult(problem="refused secret", refused=True), "refused secret"),
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
