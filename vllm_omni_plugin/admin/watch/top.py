"""The fleet in a terminal: the table of `vllm-omni-plugin top`. Needs only the standard library."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from vllm_omni_plugin.errors import ServerUnavailableError

_COLUMNS = ("ID", "STATUS", "REQUESTS", "WAIT", "TOKENS", "KV", "TOKENS/S", "HITS", "BEAT", "RESTARTS", "HELD BACK")
_REQUESTS = ("unfinished", "queued", "held", "moved", "lost", "refused")
_EVENTS = 10
_CLEAR = "\x1b[H\x1b[2J"
"""Moves a terminal's cursor to the top and clears the screen."""


class Top:
    """Shows the states that a head streams: one table after the other, of which a terminal shows the last.

    `read` opens the stream after an event's id, and yields kind and content. `pause` waits before a reconnection.
    """

    def __init__(
        self, read: Callable[[str], Iterator[tuple[str, Any]]], out: TextIO, pause: Callable[[], object]
    ) -> None:
        self._read = read
        self._out = out
        self._pause = pause
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)

    def once(self) -> None:
        """Show one state. Raises ValueError, LookupError or TypeError if the server is not a head of a fleet."""
        self._write(next(self._tables()))

    def run(self) -> None:
        """Show every state, and reconnect after an interruption. Raises like `once` until a head has answered."""
        form = _CLEAR + "{}" if self._out.isatty() else "{}\n"
        has_answered = False
        while True:
            try:
                for shown in self._tables():
                    has_answered = True
                    self._write(form.format(shown))
            except ServerUnavailableError as error:
                if not has_answered:
                    raise
                self._write(_printable(f"{error}; trying again") + "\n")
                self._pause()

    def _tables(self) -> Iterator[str]:
        is_fleet = False
        for kind, content in self._read(self._events[-1]["id"] if self._events else ""):
            is_fleet = True
            if kind == "state":
                yield _headline(content) + table(_rows(content)) + "".join(map(_event_line, self._events))
            elif kind != "history":
                self._add(content)
        raise ServerUnavailableError("the head has ended the stream") if is_fleet else ValueError("no stream of events")

    def _add(self, event: dict[str, Any]) -> None:
        # Another process answers now, and sends its events from the first one on.
        if self._events and _log_of(event) != _log_of(self._events[-1]):
            self._events.clear()
        self._events.append(event)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _log_of(event: Mapping[str, Any]) -> str:
    return str(event["id"]).partition("-")[0]


def _headline(state: Mapping[str, Any]) -> str:
    head, requests = state["head"], dict(state["requests"])
    requests["held"] = sum(count for name, count in requests.items() if name.startswith("held_"))
    coordinator = {None: "", True: "", False: ", coordinator away"}[head["coordinator"]]
    counts = "  ".join(f"{name} {requests[name]}" for name in _REQUESTS)
    return f"{_printable(head['name'])}: {head['state']}, other heads {len(head['others'])}{coordinator}  {counts}\n"


def _rows(state: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [_COLUMNS, *(_row(replica) for stage in state["stages"] for replica in stage["replicas"])]


def _row(replica: Mapping[str, Any]) -> tuple[str, ...]:
    cells: Iterable[str] = (
        replica["id"],
        replica["status"],
        str(replica["requests"]),
        str(replica["waiting"]),
        str(replica["tokens"]),
        _format(replica["kv_usage"], "{:.0%}"),
        _format(replica["tokens_per_second"], "{:.0f}"),
        _format(replica["hit_rate"], "{:.0%}"),
        _format(replica["heartbeat_seconds"], "{:.1f} s"),
        str(replica["restarts"]),
        ", ".join(replica["held_back"]) or "-",
    )
    return tuple(map(_printable, cells))


def _event_line(event: Mapping[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    where = event["replica"] or ("head" if event["stage"] is None else f"stage {event['stage']}")
    count = f"{event['requests']} requests: " if event["requests"] else ""
    return _printable(f"{clock}  {event['kind']:8}{where:8}{count}{event['reason']}") + "\n"


def _format(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _printable(text: str) -> str:
    """Replace control characters, since other nodes determine parts of the text."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)
