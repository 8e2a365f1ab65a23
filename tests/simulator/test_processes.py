"""The processes that benchmarks start, and how they are asked."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from processes import Process

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
DEAD_PROXY = "http://127.0.0.1:1"
ASK = """
import sys
from pathlib import Path
from processes import Process, total
url, log = sys.argv[1:]
sleeper = Process("sleeper", ["sleep", "60"], Path(log))
try:
    sleeper.wait_until_healthy(url)
    print(total(url, "requests"))
finally:
    sleeper.stop()
"""


class Metrics(BaseHTTPRequestHandler):
    """Answers every path with one sample."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'requests{a="b"} 3\nrequests_created 9\n')

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Metrics) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_local_servers_are_asked_without_the_environments_proxy(url: str, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name.lower() != "no_proxy"}
    environment |= {"HTTP_PROXY": DEAD_PROXY, "http_proxy": DEAD_PROXY, "PYTHONPATH": str(BENCHMARKS)}
    command = [sys.executable, "-c", ASK, url, str(tmp_path / "log")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("3.0\n", "")


def test_every_python_process_requests_amx_before_anything_else(tmp_path: Path) -> None:
    program = "import sys; print('vllm_omni_plugin.vllm_api.launch.amx' in sys.modules, 'vllm' in sys.modules)"
    process = Process("asks", [sys.executable, "-c", program], tmp_path / "log")
    process.popen.wait(60)
    assert process.log.read_text() == "True False\n"


def test_a_process_that_has_ended_is_not_waited_for_and_its_last_words_are_told(tmp_path: Path, url: str) -> None:
    process = Process("short", [sys.executable, "-c", "print('why it ended')"], tmp_path / "log")
    process.popen.wait(60)
    with pytest.raises(RuntimeError, match=r"short has ended: why it ended"):
        process.wait_until_healthy(url)
