"""How the page follows a head that a test plays: one stream for each tab, silence, other processes, unknown values."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.streaming_head import StreamingHead, event, history, state

from .browser import Browser
from .server import until

pytestmark = pytest.mark.long
IMPATIENT = "const own = setTimeout; window.setTimeout = (act, ms) => own(act, ms === 15000 ? 300 : ms);"
EVENTS = "[...document.querySelectorAll('#events li')].map((line) => line.lastChild.textContent)"


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as browser:
        yield browser


def test_a_head_that_has_vanished_is_asked_again_for_what_came_since(browser: Browser) -> None:
    streams = [history() + event("a-1", "first") + state(), history() + event("a-2", "second") + state()]
    with StreamingHead(*streams, silent=True) as head:
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=IMPATIENT)
        browser.open(f"{head.url}/omni")
        until(lambda: "3 requests: second" in browser.run(EVENTS), "what came since")
        assert head.asked[:2] == ["", "a-1"]
        assert browser.run(EVENTS)[-1] == "3 requests: first"
        until(lambda: head.viewers <= 1, "the silent stream is closed")


def test_the_events_of_another_process_replace_those_of_the_one_before(browser: Browser) -> None:
    first = history() + event("a-1", "of the first") + event("a-2", "of the first") + state()
    with StreamingHead(first, history() + event("b-1", "of the other") + state()) as head:
        browser.open(f"{head.url}/omni")
        until(lambda: browser.run(EVENTS) == ["3 requests: of the other"], "the list of the other")
        assert head.asked == ["", "a-2"]


def test_what_is_not_known_is_a_dash_and_a_comment_is_nothing(browser: Browser) -> None:
    nothing = dict.fromkeys(("kv_usage", "tokens_per_second", "hit_rate", "heartbeat_seconds", "since_seconds"))
    with StreamingHead(b": a proxy says this\n\n" + history() + state(**nothing)) as head:
        browser.open(f"{head.url}/omni")
        until(lambda: browser.run("document.querySelectorAll('.replica').length"), "the replica")
        meters = "[...document.querySelectorAll('.replica meter')].map((meter) => meter.nextSibling.textContent)"
        assert browser.run(meters) == ["3, 1 wait", "480", "-"]
        assert browser.run("document.getElementById('link').textContent") == "Live"
        assert browser.faults == []
