"""Answers of a server in a form that can be compared with another server's."""

import json
import math
import re
from typing import Any

import httpx

from .server import Server

DROPPED = frozenset(
    {
        *("id", "item_id", "request_id", "previous_response_id"),  # new for each request
        *("created", "created_at", "completed_at"),
        "sequence_number",  # depends on how tokens were put into chunks
        "system_fingerprint",  # a hash of the whole configuration, which our options are part of
        *("prompt_tokens_details", "input_tokens_details"),  # how much was cached depends on earlier requests
    }
)
"""What legitimately differs between two servers."""
_TIME = re.compile(r"\[\d\d:\d\d:\d\d\]")
JOINED = frozenset({"text", "content", "reasoning", "arguments", "delta"})
"""Strings that come in pieces."""
RELATIVE_TOLERANCE = 1e-4
"""Of log-probabilities: sums in another order, because the batch was another, differ by some 1e-6."""


def ask(server: Server, path: str, body: dict[str, Any] | None) -> Any:
    """Status and body of one request; a GET without `body`. A stream's events are joined; see `join_events`."""
    with httpx.Client(base_url=server.url, timeout=60.0, verify=False) as client:
        return ask_by(client, path, body)


def ask_by(client: httpx.Client, path: str, body: dict[str, Any] | None) -> Any:
    """The same over a connection of the caller's."""
    response = client.get(path) if body is None else client.post(path, json=body)
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        return {"status": response.status_code, "stream": join_events(response.text)}
    return {"status": response.status_code, "body": comparable(response.json()) if response.content else None}


def comparable(value: Any) -> Any:
    """A JSON value without what is in `DROPPED`, and without the time of day, which grammars' errors begin with."""
    if isinstance(value, dict):
        return {key: comparable(item) for key, item in value.items() if key not in DROPPED}
    if isinstance(value, list):
        return [comparable(item) for item in value]
    return _TIME.sub("[time]", value) if isinstance(value, str) else value


def differences(left: Any, right: Any, path: str = "") -> list[str]:
    """Where two JSON values differ, one line each; empty when they are equal up to rounding."""
    if isinstance(left, dict) and isinstance(right, dict):
        keys = sorted(left.keys() | right.keys())
        return [line for key in keys for line in differences(left.get(key), right.get(key), f"{path}.{key}")]
    if isinstance(left, list) and isinstance(right, list) and len(left) == len(right):
        pairs = enumerate(zip(left, right, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{path}[{index}]")]
    if isinstance(left, float) and isinstance(right, float):
        same = math.isclose(left, right, rel_tol=RELATIVE_TOLERANCE, abs_tol=RELATIVE_TOLERANCE)
    else:
        same = type(left) is type(right) and left == right
    return [] if same else [f"{path}: {left!r} != {right!r}"]


def join_events(text: str) -> dict[str, Any]:
    """A stream of server-sent events as one value per kind of event, whatever the chunks were.

    Returns:
        `events`: the kinds in order, a repeated one once; `joined`: by kind, all its events laid on top of each other;
        `ends`: how often the stream said that it ends.
    """
    payloads = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    kinds: list[str] = []
    joined: dict[str, Any] = {}
    for payload in payloads:
        if payload == "[DONE]":
            continue
        event = comparable(json.loads(payload))
        kind = event.get("type") or event.get("object") or "error"
        if kinds[-1:] != [kind]:
            kinds.append(kind)
        joined[kind] = _laid_on(joined.get(kind), event, kind)
    return {"events": kinds, "joined": joined, "ends": payloads.count("[DONE]")}


def _laid_on(old: Any, new: Any, key: str) -> Any:
    if new is None:
        return old
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: _laid_on(old.get(name), value, name) for name, value in new.items()}
    if isinstance(old, str) and isinstance(new, str) and key in JOINED:
        return old + new
    if isinstance(old, list) and isinstance(new, list):
        return _laid_on_list(old, new, key)
    if isinstance(new, list) and new and all(isinstance(item, dict) and "index" in item for item in new):
        return _laid_on_list([], new, key)
    return new


def _laid_on_list(old: list[Any], new: list[Any], key: str) -> list[Any]:
    """Items with an `index` (choices, tool calls) are laid on the one of that index; others are appended."""
    if not all(isinstance(item, dict) and "index" in item for item in old + new):
        return old + new
    by_index = {item["index"]: item for item in old}
    for item in new:
        by_index[item["index"]] = _laid_on(by_index.get(item["index"]), item, key)
    return [by_index[index] for index in sorted(by_index)]
