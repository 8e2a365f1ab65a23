"""The load that is read from a head's metrics, and the number of nodes computed from it (hand-computed cases)."""

from collections.abc import Iterator

import pytest

from tests.fakes.http_server import FakeServer
from vllm_omni_plugin.admin.metrics.catalogue import BY_NAME
from vllm_omni_plugin.errors import ServerUnavailableError
from vllm_omni_plugin.ray.autoscaler import (
    REPLICAS,
    WAIT,
    WINDOW_S,
    Autoscaler,
    StageLoad,
    fetch_stage_load,
)

TARGET_S = 2.0
CALM = StageLoad(serving=4, expected_wait=0.0)
SCRAPE = """\
# HELP vllm_omni_fleet:replicas Replicas by state.
# TYPE vllm_omni_fleet:replicas gauge
vllm_omni_fleet:replicas{stage="0",state="up"} 3.0
vllm_omni_fleet:replicas{stage="0",state="draining"} 1.0
vllm_omni_fleet:replicas{stage="1",state="up"} 7.0
vllm_omni_fleet:replica_info{engine="0",replica="0",stage="0"} 1.0
vllm_omni_fleet:expected_wait_seconds{stage="0"} 2.5
vllm_omni_fleet:expected_wait_seconds{stage="1"} 0.0
"""


@pytest.fixture
def head() -> Iterator[FakeServer]:
    with FakeServer() as head:
        head.answers["GET", "/metrics"] = (200, SCRAPE.encode())
        yield head


def test_the_metrics_are_in_the_catalogue() -> None:
    assert {name.removeprefix("vllm_omni_fleet:") for name in (WAIT, REPLICAS)} <= set(BY_NAME)


def test_the_load_of_each_stage_is_fetched_over_http(head: FakeServer) -> None:
    assert [fetch_stage_load(head.url, stage) for stage in (0, 1)] == [StageLoad(3, 2.5), StageLoad(7, 0.0)]


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (503, SCRAPE, "503"),
        pytest.param(200, SCRAPE.replace(WAIT, "other"), "none of stage 0", id="unknown, not zero"),
        pytest.param(200, SCRAPE.replace("2.5", "NaN"), "none of stage 0", id="a wait that is no number"),
        pytest.param(200, SCRAPE.replace("3.0", "+Inf"), "none of stage 0", id="an infinite number of replicas"),
        (200, f'{WAIT}{{stage="0"}} many\n', "many"),
        (200, f'{WAIT}{{stage="0"\n', "report the expected wait"),
    ],
)
def test_an_unusable_answer_is_an_error(head: FakeServer, status: int, body: str, reason: str) -> None:
    head.answers["GET", "/metrics"] = (status, body.encode())
    with pytest.raises(ServerUnavailableError, match=reason):
        fetch_stage_load(head.url, 0)


def test_an_unreachable_head_is_an_error() -> None:
    with FakeServer() as closed:
        port = closed.server_port
    with pytest.raises(
        ServerUnavailableError, match=rf"http://127\.0\.0\.1:{port} does not report the expected wait: .*refused"
    ):
        fetch_stage_load(f"http://127.0.0.1:{port}", 0)


def scaler(minimum: int = 1, maximum: int = 8) -> Autoscaler:
    return Autoscaler(minimum, maximum, TARGET_S)


@pytest.mark.parametrize(
    ("serving", "wait", "expected"),
    [
        pytest.param(1, 2.0, 1, id="at the target"),
        pytest.param(1, 2.1, 2, id="just above it"),
        pytest.param(1, 9.0, 5, id="in proportion to the wait"),
        pytest.param(1, 100.0, 8, id="never above the maximum"),
        pytest.param(0, 3.0, 2, id="none serves yet"),
        pytest.param(5, 3.0, 2, id="replicas of the head itself are no nodes"),
    ],
)
def test_nodes_are_added_at_once(serving: int, wait: float, expected: int) -> None:
    assert scaler().wanted(0.0, StageLoad(serving, wait)) == expected


def test_starting_nodes_are_not_requested_twice() -> None:
    it = scaler()
    assert [it.wanted(now, StageLoad(1, 5.0)) for now in (0.0, 2.0, 4.0)] == [3, 3, 3]
    assert it.wanted(6.0, StageLoad(3, 5.0)) == 8


def test_while_nodes_load_the_number_rises_once_per_window() -> None:
    it = scaler(maximum=50)
    waits = [(0.0, 5.0), (2.0, 15.0), (WINDOW_S - 1.0, 20.0)]
    assert [it.wanted(now, StageLoad(1, wait)) for now, wait in waits] == [3, 3, 3]
    assert it.wanted(WINDOW_S, StageLoad(1, 21.0)) == 11
    assert it.wanted(WINDOW_S + 2.0, StageLoad(10, 30.0)) == 11
    assert it.wanted(WINDOW_S + 4.0, StageLoad(11, 3.0)) == 17


def test_a_shorter_wait_above_the_target_removes_no_node() -> None:
    it = scaler()
    assert it.wanted(0.0, StageLoad(1, 9.0)) == 5
    assert it.wanted(2.0, StageLoad(1, 2.5)) == 5


def test_nodes_are_removed_one_per_calm_window() -> None:
    it = scaler(minimum=2)
    assert it.wanted(0.0, StageLoad(2, 4.0)) == 4
    assert it.wanted(1.0, CALM) == 4
    assert it.wanted(WINDOW_S, CALM) == 4
    assert it.wanted(1.0 + WINDOW_S, CALM) == 3
    assert it.wanted(2 * WINDOW_S, CALM) == 3
    assert it.wanted(1.0 + 2 * WINDOW_S, CALM) == 2
    assert it.wanted(1.0 + 9 * WINDOW_S, CALM) == 2


@pytest.mark.parametrize(
    "disturbance",
    [
        pytest.param(None, id="the head does not answer"),
        pytest.param(StageLoad(4, TARGET_S), id="a wait near the target"),
    ],
)
def test_a_disturbance_restarts_the_calm_window(disturbance: StageLoad | None) -> None:
    it = scaler()
    assert it.wanted(0.0, StageLoad(2, 8.0)) == 4
    it.wanted(1.0, CALM)
    assert it.wanted(WINDOW_S, disturbance) == 4
    assert it.wanted(WINDOW_S + 1.0, CALM) == 4
    assert it.wanted(2 * WINDOW_S, CALM) == 4
    assert it.wanted(2 * WINDOW_S + 1.0, CALM) == 3
