"""Writes and reads server-sent events. Needs only the standard library."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

MEDIA_TYPE = "text/event-stream"
LAST_EVENT_ID = "Last-Event-ID"
"""Request header of a client that reconnects: the id of the last event that it received."""
COMMENT = b":\n\n"
"""An empty comment, sent as a sign of life."""
SILENT_S = 15.0
"""A reader gives up after so many seconds without data. The page has the same limit."""


def message(kind: str, data: Any, event_id: str | None = None) -> bytes:
    """One event. Raises a `ValueError` for a number that JSON cannot represent."""
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}event: {kind}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()


def read_messages(lines: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """Yield kind and content of each event of a stream. Raises ValueError if the content is no JSON."""
    kind = data = ""
    for line in lines:
        name, _, value = line.decode().strip().partition(":")
        if name == "event":
            kind = value.strip()
        elif name == "data":
            data = value
        elif not line.strip() and data:
            yield kind, json.loads(data)
            kind = data = ""
