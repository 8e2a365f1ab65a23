"""Calls on the event loop of another thread."""

import asyncio
from collections.abc import Callable
from contextlib import suppress


def call_on(loop: asyncio.AbstractEventLoop | None, call: Callable[..., object], *args: object) -> None:
    """Let a loop call a function soon, unless it has ended or is not known yet (None). From any thread."""
    if loop is not None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(call, *args)
