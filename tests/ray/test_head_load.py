"""What is read of a head's metrics."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from vllm_omni_plugin.admin.metrics.catalogue import BY_NAME
from vllm_omni_plugin.errors import ServerUnavailableError
from vllm_omni_plugin.ray.head_load import REPLICAS, WAIT, load_of, read_load
from vllm_omni_plugin.ray.scaler import Load

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


class Head(HTTPServer):
    """Answers with `status` and `body`."""

    status = 200
    body = SCRAPE

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Head

    def do_GET(self) -> None:
        self.send_response(self.server.status if self.path == "/metrics" else 404)
        self.end_headers()
        self.wfile.write(self.server.body.encode())

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def head() -> Iterator[Head]:
    with Head(("127.0.0.1", 0), _Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_stages_are_told_apart() -> None:
    assert [load_of(SCRAPE, stage) for stage in (0, 1)] == [Load(3, 2.5), Load(7, 0.0)]


def test_a_wait_that_is_not_known_yet_is_no_wait_of_zero() -> None:
    known = "".join(line for line in SCRAPE.splitlines(keepends=True) if not line.startswith(WAIT))
    with pytest.raises(ValueError, match="none of stage 0"):
        load_of(known, 0)


@pytest.mark.parametrize("number", ["NaN", "+Inf"])
@pytest.mark.parametrize("known", ["2.5", "3.0"])
def test_what_is_no_finite_number_is_no_load(number: str, known: str) -> None:
    with pytest.raises(ValueError, match="none of stage 0"):
        load_of(SCRAPE.replace(known, number), 0)


def test_the_metrics_are_those_that_heads_have() -> None:
    assert {name.removeprefix("vllm_omni_fleet:") for name in (WAIT, REPLICAS)} <= set(BY_NAME)


def test_a_head_is_asked_over_http(head: Head) -> None:
    assert read_load(head.url, 0) == Load(3, 2.5)


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        (503, SCRAPE, "503"),
        (200, "", "none of stage 0"),
        (200, f'{WAIT}{{stage="0"}} many\n', "many"),
        (200, f'{WAIT}{{stage="0"\n', "tell the wait"),
    ],
)
def test_a_head_that_says_nothing_usable_is_no_answer(head: Head, status: int, body: str, reason: str) -> None:
    head.status, head.body = status, body
    with pytest.raises(ServerUnavailableError, match=reason):
        read_load(head.url, 0)


def test_a_head_that_is_not_there_is_no_answer() -> None:
    with HTTPServer(("127.0.0.1", 0), _Handler) as closed:
        port = closed.server_port
    with pytest.raises(ServerUnavailableError, match=rf"http://127\.0\.0\.1:{port} does not tell the wait: .*refused"):
        read_load(f"http://127.0.0.1:{port}", 0)
