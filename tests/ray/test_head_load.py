"""What is read of a head's metrics."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from vllm_omni_plugin.admin.metrics.catalogue import BY_NAME
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
    assert [load_of(SCRAPE, stage) for stage in (0, 1, 2)] == [Load(3, 2.5), Load(7, 0.0), None]


def test_a_wait_that_is_not_known_yet_is_no_wait_of_zero() -> None:
    known = "".join(line for line in SCRAPE.splitlines(keepends=True) if not line.startswith(WAIT))
    assert load_of(known, 0) is None


def test_the_metrics_are_those_that_heads_have() -> None:
    assert {name.removeprefix("vllm_omni_fleet:") for name in (WAIT, REPLICAS)} <= set(BY_NAME)


def test_a_head_is_asked_over_http(head: Head) -> None:
    assert read_load(head.url, 0) == Load(3, 2.5)


@pytest.mark.parametrize(
    ("status", "body"),
    [(503, SCRAPE), (200, ""), (200, f'{WAIT}{{stage="0"}} many\n'), (200, f'{WAIT}{{stage="0"\n')],
)
def test_a_head_that_says_nothing_usable_is_no_error(head: Head, status: int, body: str) -> None:
    head.status, head.body = status, body
    assert read_load(head.url, 0) is None


def test_a_head_that_is_not_there_is_no_error(head: Head) -> None:
    with HTTPServer(("127.0.0.1", 0), _Handler) as closed:
        port = closed.server_port
    assert read_load(f"http://127.0.0.1:{port}", 0) is None
