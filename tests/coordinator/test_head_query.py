"""The query of a node before it loads a model."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import zmq
from coordinator_support import ANY, OpenDealer, OpenSocket, eventually, free_address, process_status, read_if_there

from tests.fakes.keeping import Keep
from tests.fakes.secret_files import write_secret
from vllm_omni_plugin.coordinator import OmniCoordinator, OmniCoordinatorRuntime, query_head
from vllm_omni_plugin.coordinator.client import head_query
from vllm_omni_plugin.curve import HANDSHAKE_MS, Secrets

FINGERPRINTS = {0: {"stage": "0", "model": "a"}, 1: {"stage": "1", "model": "b"}}
NOW = 1_000_000.0
OLD_LINE, NEW_LINE = "the old secret of the fleet", "the new secret of the fleet"
OLD, NEW = Secrets([OLD_LINE]), Secrets([NEW_LINE])

PATIENCE_S = 30.0

Serve = Callable[[Secrets | None], str]


@pytest.fixture
def serve(keep: Keep) -> Serve:
    """Opens coordinators of a head with two stages; returns their addresses."""
    return lambda secrets: (
        keep(
            OmniCoordinator(ANY, ANY, secrets=secrets, fingerprints=FINGERPRINTS, wall_clock=lambda: NOW)
        ).router_zmq_addr
    )


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short timeout, for answers that never come."""
    monkeypatch.setattr(head_query, "TIMEOUT_S", 0.3)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timeouts that no answer reaches even on a busy machine."""
    monkeypatch.setattr(head_query, "TIMEOUT_S", PATIENCE_S)


@pytest.mark.parametrize("stage_id", FINGERPRINTS)
@pytest.mark.parametrize("held", [OLD, Secrets([NEW_LINE, OLD_LINE])], ids=["same", "ahead in a rotation"])
def test_a_holder_of_the_secret_gets_the_time_and_the_fingerprint_of_its_stage(
    serve: Serve, held: Secrets, stage_id: int
) -> None:
    answer = query_head(serve(OLD), stage_id, held, wall_clock=lambda: NOW)
    assert answer.info is not None
    assert (answer.info.timestamp, answer.info.stages) == (NOW, [0, 1])
    assert answer.info.fingerprint == FINGERPRINTS[stage_id]
    assert (answer.clock_ahead, answer.problem, answer.refused) == (0.0, "", False)


@pytest.mark.parametrize(
    ("secrets", "stage_id", "stages"),
    [pytest.param(OLD, 7, [0, 1], id="unknown stage"), pytest.param(None, 0, [], id="no secret")],
)
def test_an_unknown_stage_and_a_head_without_a_secret_have_no_fingerprint(
    serve: Serve, secrets: Secrets | None, stage_id: int, stages: list[int]
) -> None:
    info = query_head(serve(secrets), stage_id, secrets).info
    assert info is not None
    assert (info.stages, info.fingerprint) == (stages, {})


@pytest.mark.parametrize(
    ("sent", "received", "ahead"),
    [(NOW - 9, NOW - 8, -8.0), (NOW - 1, NOW + 1, 0.0), (NOW + 20, NOW + 21, 20.0)],
)
def test_the_clocks_differ_by_no_more_than_the_time_of_the_answer_allows(
    serve: Serve, sent: float, received: float, ahead: float
) -> None:
    # Read when the query is made, when it is sent, and when the answer comes.
    times = iter([sent, sent, received])
    assert query_head(serve(OLD), 0, OLD, wall_clock=lambda: next(times)).clock_ahead == ahead


@pytest.mark.parametrize(
    ("served", "held"),
    [
        pytest.param(OLD, NEW, id="another"),
        pytest.param(OLD, None, id="missing"),
        pytest.param(None, OLD, id="needless"),
        pytest.param(OLD, Secrets([NEW_LINE, "one more secret than two"]), id="two others"),
    ],
)
def test_a_wrong_secret_is_refused_within_seconds(serve: Serve, served: Secrets | None, held: Secrets | None) -> None:
    began = time.monotonic()
    answer = query_head(serve(served), 0, held)
    assert answer.refused
    assert answer.info is None
    assert "refused secret" in answer.problem
    assert time.monotonic() - began < 2 * HANDSHAKE_MS / 1000


def test_a_head_that_is_not_there_costs_no_time_and_refuses_nobody(patient: None) -> None:
    began = time.monotonic()
    answer = query_head(free_address(), 0, OLD)
    assert not answer.refused
    assert "no coordinator answers" in answer.problem
    assert time.monotonic() - began < PATIENCE_S


def test_a_silent_server_costs_no_more_than_the_timeout(impatient: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        answer = query_head(f"tcp://127.0.0.1:{server.getsockname()[1]}", 0, OLD)
    assert "does not answer" in answer.problem
    assert not answer.refused


@pytest.fixture
def router(open_socket: OpenSocket) -> zmq.Socket[bytes]:
    """The ROUTER of a head that the test plays."""
    router = open_socket(zmq.ROUTER)
    router.bind("tcp://127.0.0.1:0")
    return router


def test_an_older_head_does_not_answer_and_refuses_nobody(impatient: None, router: zmq.Socket[bytes]) -> None:
    answer = query_head(router.get_string(zmq.LAST_ENDPOINT), 0, None)
    assert "older version" in answer.problem
    assert not answer.refused
    _, question = router.recv_multipart()
    assert json.loads(question) == {"type": "head_query", "stage_id": 0}


@pytest.mark.parametrize("answer_frame", [b"", b"[]", b"\xff\x00", b'[{"type":"head_info"}]', b"[" * 100_000])
def test_an_invalid_answer_is_reported_as_a_problem(router: zmq.Socket[bytes], answer_frame: bytes) -> None:
    with ThreadPoolExecutor(1) as executor:
        asking = executor.submit(query_head, router.get_string(zmq.LAST_ENDPOINT), 0, None)
        peer, _ = router.recv_multipart()
        router.send_multipart((peer, answer_frame))
        result = asking.result()
    assert "cannot be read" in result.problem
    assert (result.info, result.refused) == (None, False)


@pytest.mark.parametrize(
    "frame",
    [
        b'{"type":"head_query"}',
        b'{"type":"head_query","stage_id":-1}',
        b'{"type":"head_query","stage_id":0,"host_slots":[""]}',
    ],
)
def test_a_malformed_question_is_counted_and_others_are_answered(
    coordinator: OmniCoordinator, dealer: OpenDealer, frame: bytes
) -> None:
    dealer(coordinator.router_zmq_addr).send(frame)
    eventually(lambda: coordinator.invalid_frames["malformed"] == 1)
    assert query_head(coordinator.router_zmq_addr, 0, None).info is not None


def test_the_coordinator_process_answers_also_after_a_restart(tmp_path: Path) -> None:
    secret_file = write_secret(tmp_path / "secret", OLD_LINE)
    runtime = OmniCoordinatorRuntime(secret_file=secret_file, fingerprints=FINGERPRINTS)
    try:
        for _ in range(2):
            pid = runtime.process_id
            assert pid is not None
            assert "stage" not in read_if_there(Path(f"/proc/{pid}/cmdline"))
            info = query_head(runtime.router_address, 1, OLD).info
            assert info is not None
            assert info.fingerprint == FINGERPRINTS[1]
            os.kill(pid, signal.SIGKILL)
            eventually(lambda killed=pid: runtime.process_id not in (None, killed))
            eventually(lambda: "State" in process_status(runtime.process_id or 0))
            eventually(lambda: query_head(runtime.router_address, 1, OLD).info is not None)
    finally:
        runtime.close()
