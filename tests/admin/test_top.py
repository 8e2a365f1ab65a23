"""`vllm-omni-plugin top`: the fleet in a terminal, from a head that comes and goes."""

import io
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.free_ports import free_port
from tests.fakes.streaming_head import STATE, StreamingHead, event, history, state
from vllm_omni_plugin import cli
from vllm_omni_plugin.admin.watch.top import Top
from vllm_omni_plugin.cli import main
from vllm_omni_plugin.errors import OmniError, ServerUnavailableError

TABLE = """\
host: up, other heads 1, coordinator away  unfinished 3  queued 0  held 2  moved 5  lost 0  refused 2
ID   STATUS    REQUESTS  WAIT  TOKENS  KV   TOKENS/S  HITS  HEARTBEAT  RESTARTS  CORDONS
0.1  draining  3         1     480     50%  100       -     0.2 s      0         admin
"""
LOST = {"time": 0, "kind": "lost", "stage": 0, "replica": "0.1", "reason": "it died", "requests": 3}
Stream = list[tuple[str, Any] | OmniError]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Streams:
    """Streams of a fake head, one after the other, followed by Ctrl-C."""

    def __init__(self, *streams: Stream) -> None:
        self._streams = iter(streams)
        self.asked: list[str] = []

    def __call__(self, last_event: str) -> Iterator[tuple[str, Any]]:
        self.asked.append(last_event)
        for item in next(self._streams, [KeyboardInterrupt()]):
            if isinstance(item, BaseException):
                raise item
            yield item


def lost(event_id: str) -> tuple[str, Any]:
    return "lost", {"id": event_id, **LOST}


def run(streams: Streams, out: io.StringIO, lines: int = 50, columns: int = 120) -> str:
    """The output until Ctrl-C."""
    with pytest.raises(KeyboardInterrupt):
        Top(streams, out, lambda: None, lambda: os.terminal_size((columns, lines))).run()
    return out.getvalue()


def test_it_shows_replicas_and_events_without_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    comments = b": a proxy says this\n\n:\n\n"
    with StreamingHead(comments + history() + event("a-1", "\x1b[2J") + state()) as head:
        assert main(["top", "--once", "--url", head.url]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(TABLE)
    assert shown.endswith("lost    0.1     3 requests: ?[2J\n")


def test_the_former_name_of_cordons_is_read_too() -> None:
    (stage,) = STATE["stages"]
    (replica,) = stage["replicas"]
    former = {"held_back" if name == "cordons" else name: value for name, value in replica.items()}
    shown = run(Streams([("state", {**STATE, "stages": [{**stage, "replicas": [former]}]})]), io.StringIO())
    assert shown.startswith(TABLE)


def test_a_replica_of_another_generation_is_shown_with_its_difference() -> None:
    (stage,) = STATE["stages"]
    (replica,) = stage["replicas"]
    other = {**replica, "cordons": [], "status": "other-generation", "other_generation": "dtype: a, b"}
    shown = run(Streams([("state", {**STATE, "stages": [{**stage, "replicas": [other]}]})]), io.StringIO())
    assert shown.splitlines()[2].split()[1] == "other-generation"
    assert shown.splitlines()[2].endswith("  dtype: a, b")


def fleet_of(statuses: dict[int, str]) -> Stream:
    (stage,) = STATE["stages"]
    (replica,) = stage["replicas"]
    replicas = [{**replica, "id": f"0.{number}", "status": status} for number, status in statuses.items()]
    return [("history", []), ("state", {**STATE, "stages": [{**stage, "replicas": replicas}]})]


def test_a_large_fleet_fits_the_terminal_beside_the_last_events() -> None:
    stream = fleet_of({**dict.fromkeys(range(258), "up"), 77: "error"})
    stream[1:1] = [lost(f"a-{number}") for number in range(9)]
    shown = run(Streams(stream), Terminal(), lines=24, columns=60).split("\x1b[2J")[1]
    *lines, interruption = shown.splitlines()
    assert "trying again" in interruption
    # The head's line takes two rows of the terminal, and one is the cursor's.
    assert len(lines) == 22
    assert lines[2].split()[:2] == ["0.77", "error"]
    assert lines[-6] == "... and 244 more"
    assert [line.split()[1] for line in lines[-5:]] == ["lost"] * 5
    assert max(map(len, lines[1:])) <= 60


def test_it_reconnects_and_keeps_its_events() -> None:
    away = ServerUnavailableError("no answer from here")
    streams = Streams([lost("a-1"), ("state", STATE), away], [away], [lost("a-2"), ("state", STATE)])
    shown = run(streams, io.StringIO())
    assert streams.asked == ["", "a-1", "a-1", "a-2"]
    assert shown.count("no answer from here; trying again\n") == 2
    assert shown.count("the head has ended the stream; trying again\n") == 1
    last = shown[shown.rindex(TABLE) :]
    assert last.count("it died") == 2


def test_events_of_another_process_replace_the_old_ones() -> None:
    streams = Streams([lost("a-1"), lost("a-2"), ("state", STATE)], [lost("b-1"), ("state", STATE)])
    shown = run(streams, io.StringIO())
    assert shown[shown.rindex(TABLE) :].count("it died") == 1


def test_a_silent_head_is_noticed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def pause(_: float) -> None:
        raise KeyboardInterrupt

    # Long enough for a busy machine to send the first state.
    monkeypatch.setattr(cli, "SILENT_S", 1.0)
    monkeypatch.setattr("time.sleep", pause)
    with StreamingHead(state()) as head:
        assert main(["top", "--url", head.url]) == 0
    assert capsys.readouterr().out == f"{TABLE}\nno answer from {head.url}: timed out; trying again\n"


def test_an_unreachable_head_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["top", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "no answer from" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["--once"]])
@pytest.mark.parametrize("answer", [b'{"replicas": []}', b"data: {\n\n", b"event: state\ndata: 7\n\n", b"data: 7\xff"])
def test_a_server_that_is_no_head_is_reported(
    capsys: pytest.CaptureFixture[str], arguments: list[str], answer: bytes
) -> None:
    # The first of two streams ends.
    with StreamingHead(answer, b"") as head:
        assert main(["top", *arguments, "--url", head.url]) == 1
    assert "it is not the server of a fleet" in capsys.readouterr().err


def test_a_key_file_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["top", "--url", "http://127.0.0.1:1", "--admin-key-file", str(tmp_path / "none")]) == 1
    assert "--admin-key-file" in capsys.readouterr().err


def test_it_ends_when_its_output_is_closed() -> None:
    with StreamingHead(history() + state() * 1000, b"") as head:
        command = [str(Path(sys.executable).with_name("vllm-omni-plugin")), "top", "--url", head.url]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        with process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline().startswith("host: up")
            process.stdout.close()
            assert process.stderr.read() == ""
        assert process.returncode == 0
