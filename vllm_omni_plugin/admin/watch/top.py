"""The fleet in a terminal: the table of `vllm-omni-plugin top`. Needs only the standard library."""

import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from os import terminal_size
from typing import Any, TextIO

from vllm_omni_plugin.errors import ServerUnavailableError
from vllm_omni_plugin.logger import printable

_COLUMNS = ("ID", "STATUS", "REQUESTS", "WAIT", "TOKENS", "KV", "TOKENS/S", "HITS", "HEARTBEAT", "RESTARTS", "CORDONS")
_REQUESTS = ("unfinished", "queued", "held", "moved", "lost", "refused")
_FORMER_NAMES = {"held_back": "cordons", "in_flight": "total_in_flight", "dispatched": "assigned"}
_EVENTS = 10
_CLEAR = "\x1b[H\x1b[2J"
"""Moves a terminal's cursor to the top and clears the screen."""


class Top:
    """Shows the states that a head streams: one table after the other, of which a terminal shows the last.

    `read` opens the stream after an event's id, and yields kind and content. `pause` waits before a reconnection. A
    terminal of `size` shows as much of each table as fits.
    """

    def __init__(
        self,
        read: Callable[[str], Iterator[tuple[str, Any]]],
        out: TextIO,
        pause: Callable[[], object],
        size: Callable[[], terminal_size] = shutil.get_terminal_size,
    ) -> None:
        self._read = read
        self._out = out
        self._pause = pause
        self._size = size
        self._events: deque[dict[str, Any]] = deque(maxlen=_EVENTS)

    def once(self) -> None:
        """Show one state. Raises ValueError, LookupError or TypeError if the server is not a head of a fleet."""
        self._write("".join(next(self._tables(lambda: None))))

    def run(self) -> None:
        """Show every state, and reconnect after an interruption. Raises like `once` until a head has answered."""
        is_terminal = self._out.isatty()
        form = _CLEAR + "{}" if is_terminal else "{}\n"
        has_answered = False
        while True:
            try:
                for lines in self._tables(self._size if is_terminal else lambda: None):
                    has_answered = True
                    self._write(form.format("".join(lines)))
            except ServerUnavailableError as error:
                if not has_answered:
                    raise
                self._write(printable(f"{error}; trying again") + "\n")
                self._pause()

    def _tables(self, size: Callable[[], terminal_size | None]) -> Iterator[list[str]]:
        is_fleet = False
        for kind, content in self._read(self._events[-1]["id"] if self._events else ""):
            is_fleet = True
            if kind == "state":
                events = list(map(_event_line, self._events))
                yield _fitted(_headline(content), table(_rows(content)).splitlines(True), events, size())
            elif kind != "history":
                self._add_event(content)
        raise ServerUnavailableError("the head has ended the stream") if is_fleet else ValueError("no stream of events")

    def _add_event(self, event: dict[str, Any]) -> None:
        """Keep an event. The first one of a restarted head drops those of its former process."""
        if self._events and _log_of(event) != _log_of(self._events[-1]):
            self._events.clear()
        self._events.append(event)

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def with_current_names(replica: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a replica, whose head may have version 0.1, with the names of this version as well."""
    given = dict(replica)
    return {_FORMER_NAMES.get(name, name): value for name, value in given.items()} | given


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines, each column as wide as its longest cell; for terminals."""
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def _fitted(head: str, replicas: list[str], events: list[str], size: terminal_size | None) -> list[str]:
    """All lines, as many and as much of each as fit a terminal. The head's may wrap; the last events get a quarter."""
    if size is None:
        return [head, *replicas, *events]
    # The last line stays free for the cursor.
    rows = size.lines - 2 - (len(head) - 2) // size.columns
    if len(replicas) + len(events) > rows:
        events = events[-max(1, rows // 4) :]
        shown = replicas[: max(1, rows - len(events) - 1)]
        if len(shown) < len(replicas):
            replicas = [*shown, f"... and {len(replicas) - len(shown)} more\n"]
    return [head, *(f"{line[:-1][: size.columns]}\n" for line in (*replicas, *events))]


def _log_of(event: Mapping[str, Any]) -> str:
    return str(event["id"]).partition("-")[0]


def _headline(state: Mapping[str, Any]) -> str:
    head, requests = state["head"], dict(state["requests"])
    requests["held"] = sum(count for name, count in requests.items() if name.startswith("held_"))
    coordinator = {None: "", True: "", False: ", coordinator away"}[head["coordinator"]]
    counts = "  ".join(f"{name} {requests[name]}" for name in _REQUESTS)
    return f"{printable(head['name'])}: {head['state']}, other heads {len(head['others'])}{coordinator}  {counts}\n"


def _rows(state: Mapping[str, Any]) -> list[tuple[str, ...]]:
    replicas = [with_current_names(replica) for stage in state["stages"] for replica in stage["replicas"]]
    return [_COLUMNS, *map(_row, sorted(replicas, key=_order))]


def _order(replica: Mapping[str, Any]) -> tuple[bool, int, int]:
    """What is not up comes first, as somebody looks for it; then by stage and number."""
    stage, _, number = replica["id"].partition(".")
    return replica["status"] == "up", int(stage), int(number)


def _row(replica: Mapping[str, Any]) -> tuple[str, ...]:
    return (
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
        ", ".join(replica["cordons"]) or replica.get("other_generation") or "-",
    )


def _event_line(event: Mapping[str, Any]) -> str:
    clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    where = event["replica"] or ("head" if event["stage"] is None else f"stage {event['stage']}")
    count = f"{event['requests']} requests: " if event["requests"] else ""
    return printable(f"{clock}  {event['kind']:8}{where:8}{count}{event['reason']}") + "\n"


def _format(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
