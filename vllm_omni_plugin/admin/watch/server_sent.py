"""Server-sent events, written and read. Needs only the standard library."""

import json
from collections.abc import Iterable, Iterator
from typing import Any

MEDIA_TYPE = "text/event-stream"
LAST_EVENT_ID = "Last-Event-ID"
"""Header of who comes back: the id of the last event that it has."""
COMMENT = b":\n\n"
"""Says nothing. Who sends nothing else shows by it that it is still there."""
SILENT_S = 15.0
"""Seconds without a word after which a reader takes it that nobody sends any more. The page has the same."""


def message(kind: str, data: Any, event_id: str | None = None) -> bytes:
    """One event. Raises a `ValueError` for a number that JSON has not; there are no line ends in JSON."""
    head = "" if event_id is None else f"id: {event_id}\n"
    return f"{head}event: {kind}\ndata: {json.dumps(data, allow_nan=False)}\n\n".encode()


def read_messages(lines: Iterable[bytes]) -> Iterator[tuple[str, Any]]:
    """Kind and content of each event that `message` wrote, as it comes.

    Raises:
        ValueError: the content is no JSON.
    """
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
