"""The state of the fleet and its events as lines for a terminal. Needs only the standard library."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

_COLUMNS = ("ID", "STATUS", "REQUESTS", "WAIT", "TOKENS", "KV", "TOKENS/S", "HITS", "BEAT", "RESTARTS", "HELD BACK")
_REQUESTS = ("unfinished", "queued", "held", "moved", "lost", "refused")


def headline(state: Mapping[str, Any]) -> str:
    """The head and its requests in one line."""
    head, requests = state["head"], dict(state["requests"])
    requests["held"] = sum(count for name, count in requests.items() if name.startswith("held_"))
    coordinator = {None: "", True: "", False: ", coordinator away"}[head["coordinator"]]
    counts = "  ".join(f"{name} {requests[name]}" for name in _REQUESTS)
    return f"{plain(head['name'])}: {head['state']}, other heads {len(head['others'])}{coordinator}  {counts}\n"


def rows(state: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The names of the columns, and a row for each replica."""
    return [_COLUMNS, *(_row(replica) for stage in state["stages"] for replica in stage["replicas"])]


def event_line(event: Mapping[str, Any]) -> str:
    """One event in one line."""
    clock = time.strftime("%H:%M:%S", time.localtime(event["time"]))
    where = event["replica"] or ("head" if event["stage"] is None else f"stage {event['stage']}")
    count = f"{event['requests']} requests: " if event["requests"] else ""
    return plain(f"{clock}  {event['kind']:8}{where:8}{count}{event['reason']}") + "\n"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows as lines, each column as wide as its longest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "".join(f"{line}\n" for line in lines)


def plain(text: str) -> str:
    """A text without what a terminal would obey: replicas of other nodes have a say in it."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def _row(replica: Mapping[str, Any]) -> tuple[str, ...]:
    cells: Iterable[str] = (
        replica["id"],
        replica["status"],
        str(replica["requests"]),
        str(replica["waiting"]),
        str(replica["tokens"]),
        _known(replica["kv_usage"], "{:.0%}"),
        _known(replica["tokens_per_second"], "{:.0f}"),
        _known(replica["hit_rate"], "{:.0%}"),
        _known(replica["heartbeat_seconds"], "{:.1f} s"),
        str(replica["restarts"]),
        ", ".join(replica["held_back"]) or "-",
    )
    return tuple(map(plain, cells))


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)
