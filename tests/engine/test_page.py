"""The page `/omni` in a browser, in front of a head and simulated replicas; and a head's end while it has requests.

With `OMNI_PICTURES=FOLDER` the pictures of docs/watch.md are made there.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes.free_ports import free_port

from .browser import Browser
from .load import Load
from .nodes import NodeFleet
from .server import MODEL, STOP_S, ServeProcess, Server, until, write_secret

pytestmark = pytest.mark.long

API_KEY = "api-key-of-this-test"
ADMIN_KEY = "admin-key-of-this-test"
SIM = str(Path(sys.executable).with_name("vllm-omni-plugin"))
VLLM = str(Path(sys.executable).with_name("vllm"))
MARKUP = "<img src=x onerror='window.hacked = 1'><script>window.hacked = 1</script>"
ROW_WITHIN_S = 2.0


class PipelineHead(Server):
    """A head for a pipeline's file."""

    def command(self, model: Path, *args: str) -> list[str]:
        return [VLLM, "serve", "--omni-pipeline", str(model), *args]


@pytest.fixture
def guarded(tiny_model: Path, tmp_path: Path) -> Iterator[NodeFleet]:
    """Two simulated replicas behind keys."""
    keys = tmp_path / "admin.keys"
    keys.touch(mode=0o600)
    keys.write_text(ADMIN_KEY)
    flags = ("--api-key", API_KEY, "--omni-admin-key-file", str(keys), "--omni-drain-timeout", "0")
    with NodeFleet(tiny_model, tmp_path / "guarded.log", nodes=0, sims=2, head_flags=flags) as fleet:
        yield fleet


@pytest.fixture
def plain_sim(tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    """A head with one simulated replica, and no flags but those it needs."""
    with NodeFleet(tiny_model, tmp_path / "plain.log", nodes=0, sims=1) as fleet:
        yield fleet.head


@pytest.fixture
def pipeline(tiny_model: Path, tmp_path: Path) -> Iterator[Server]:
    """The head of a writer and a refiner, with one simulated replica each."""
    file = tmp_path / "pipeline.yaml"
    common: dict[str, Any] = {"engine": "vllm", "model": str(tiny_model), "replicas": 0, "output": "text"}
    common["engine_args"] = {"max-model-len": 512, "enforce-eager": True, "dtype": "float32"}
    stages = [{"id": 0, "name": "writer", **common}]
    stages.append({"id": 1, "name": "refiner", **common, "inputs": ["writer"], "final": True})
    file.write_text(json.dumps({"stages": stages}))
    secret = write_secret(tmp_path / "secret")
    join = ("-oma", "127.0.0.1", "-omp", str(free_port()), "--omni-secret-file", str(secret))
    node = [SIM, "sim", "--omni-pipeline", str(file), *join, "--omni-stage-id"]
    with ExitStack() as running:
        for stage in range(2):
            running.push(ServeProcess([*node, str(stage)], tmp_path / f"{stage}.log"))
        yield running.enter_context(PipelineHead(file, tmp_path / "head.log", *join))


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        yield browser


def ask(head: Server, prompt: str) -> int:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 400, "ignore_eos": True}
    with head.http(120.0) as http:
        return http.post("/v1/completions", json=body, headers={"Authorization": f"Bearer {API_KEY}"}).status_code


def row(browser: Browser, replica: str) -> str:
    """What the page says of the state of a replica; "" if it has no row."""
    return str(browser.run(f"document.getElementById('replica-{replica}')?.querySelector('.status').textContent ?? ''"))


def click(browser: Browser, label: str) -> None:
    """Press a button by keyboard."""
    browser.run(f"document.querySelector('[aria-label=\"{label}\"]').focus()")
    browser.press("Enter", 13, "\r")


def use_key(browser: Browser, key: str) -> None:
    browser.run("document.getElementById('key').focus()")
    browser.type(key)


def test_the_page_shows_the_fleet_as_it_changes_and_changes_it(guarded: NodeFleet, browser: Browser) -> None:
    head = guarded.head
    pictures = Path(os.environ["OMNI_PICTURES"]) if "OMNI_PICTURES" in os.environ else None
    browser.look(1280, 1100)
    browser.open(f"{head.url}/omni")
    until(lambda: "key" in browser.run("document.getElementById('link').textContent"), "it asks for a key")
    assert row(browser, "0.0") == ""
    browser.faults.clear()
    use_key(browser, API_KEY)
    until(lambda: [row(browser, name) for name in ("0.0", "0.1")] == ["up", "up"], "both rows")
    assert browser.run("location.href") == f"{head.url}/omni", "the key is in no address"
    assert browser.run("document.cookie + JSON.stringify({...localStorage, ...sessionStorage})") == "{}"

    top = subprocess.run(
        [SIM, "top", "--once", "--url", head.url, "--api-key", API_KEY], capture_output=True, text=True, check=True
    )
    assert [line.split()[:2] for line in top.stdout.splitlines()[2:4]] == [["0.0", "up"], ["0.1", "up"]]

    # A key that may look may not change.
    shown = "[...document.querySelectorAll('main button')].filter((each) => each.checkVisibility()).length"
    assert browser.run(shown) == 0
    use_key(browser, ADMIN_KEY)
    until(lambda: browser.run(shown) > 0, "buttons for changes")
    click(browser, "Drain replica 0.0")
    until(lambda: browser.run("document.getElementById('confirm').open"), "it asks first")
    browser.press("Enter", 13, "\r")
    until(lambda: not browser.run("document.getElementById('confirm').open"), "Enter cancels")
    click(browser, "Drain replica 0.0")
    click_yes(browser)
    until(lambda: row(browser, "0.0") == "draining, cordoned: admin", "the drain is shown")
    click(browser, "Resume replica 0.0")
    click_yes(browser)
    until(lambda: row(browser, "0.0") == "up", "the end of the drain is shown")

    with ThreadPoolExecutor(8) as threads:
        answers = [threads.submit(ask, head, f"{number} " * 20) for number in range(8)]
        requests = "document.getElementById('replica-0.0').querySelector('meter').value"
        until(lambda: browser.run(requests) > 0, "its load is shown")
        if pictures is not None:
            browser.run("window.scrollTo(0, 0)")
            browser.picture(pictures / "fleet.png")
        guarded.nodes[1].kill()
        killed_at = time.monotonic()
        until(lambda: [row(browser, name) for name in ("0.0", "0.1")] != ["up", "up"], "its row changes")
        assert time.monotonic() - killed_at < ROW_WITHIN_S
        assert [answer.result() for answer in answers] == [200] * 8
    kinds = "[...document.querySelectorAll('#events li')].map((line) => line.className)"
    until(lambda: {"lost", "move", "drain", "resume", "attach"} <= set(browser.run(kinds)), "what happened is listed")

    browser.look(390, 844, dark=True)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    if pictures is not None:
        browser.picture(pictures / "fleet-phone.png")
    nameless = "[...document.querySelectorAll('button, meter, svg, input')].filter((each) => !each.closest('dialog') &&"
    nameless += " !(each.ariaLabel || each.textContent || each.labels?.length)).length"
    assert browser.run(nameless) == 0

    browser.run(f"showEvent('lost', {{id: 'x-1', time: 1, replica: '0.0', requests: 0, reason: {MARKUP!r}}})")
    browser.run("document.body.append(Object.assign(document.createElement('script'), {text: 'window.hacked = 1'}))")
    assert browser.run("document.querySelectorAll('#events img').length + (window.hacked ?? 0)") == 0
    policy = "Content Security Policy"
    assert [fault for fault in browser.faults if policy not in fault and "401" not in fault] == []


def click_yes(browser: Browser) -> None:
    browser.run("document.getElementById('yes').focus()")
    browser.press("Enter", 13, "\r")


def test_a_pipeline_is_shown_as_columns_and_as_a_graph(pipeline: Server, browser: Browser) -> None:
    browser.look(1280, 1000)
    browser.open(f"{pipeline.url}/omni")
    until(lambda: [row(browser, name) for name in ("0.0", "1.0")] == ["up", "up"], "a row in each column")
    assert browser.run("document.querySelector('#graph svg').getAttribute('aria-label')") == "Stages: writer to refiner"
    titles = "[...document.querySelectorAll('.stage h3')].map((title) => title.textContent.split(':')[0])"
    assert browser.run(titles) == ["Stage 0, writer", "Stage 1, refiner"]
    if "OMNI_PICTURES" in os.environ:
        browser.picture(Path(os.environ["OMNI_PICTURES"], "pipeline.png"))
    assert browser.faults == []


def test_requests_have_time_at_the_end_unless_a_second_signal_comes(plain_sim: Server) -> None:
    head = plain_sim
    with Load(head) as load, head.operator() as http, http.stream("GET", "/omni/events", headers=AS_STREAM) as viewer:
        for call, health in (("drain", 503), ("resume", 200)):
            assert http.post(f"/omni/{call}").status_code == httpx.codes.NO_CONTENT
            assert head.health() == health
        stream = load.send(1000, stream=True)
        assert stream.started.wait(60)
        head.tell_to_end()
        until(lambda: "a second signal aborts them" in head.log.read_text(), "it handles another signal")
        assert (head.health(), stream.finish_reasons) == (httpx.codes.SERVICE_UNAVAILABLE, [])
        head.process.send_signal(signal.SIGTERM)
        parts: list[str] = []
        # The second signal waits for no connection, so the server may cut this one off.
        with suppress(httpx.RemoteProtocolError):
            parts.extend(viewer.iter_text())
        assert "event: drain" in "".join(parts), "the stream of a viewer ends with the server"
    assert stream.finish_reasons == ["abort"]
    assert head.process.wait(STOP_S) == 0


AS_STREAM = {"Accept": "text/event-stream"}
