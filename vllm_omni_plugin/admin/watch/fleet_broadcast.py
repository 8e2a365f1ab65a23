"""Streams the fleet's state and events to all viewers from one producer, which stops when there are no viewers."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

from vllm_omni_plugin.admin.watch.fleet_view import FleetView
from vllm_omni_plugin.admin.watch.server_sent import COMMENT, message
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.event_log import EventLog, FleetEvent
from vllm_omni_plugin.other_loop import call_on

logger = init_logger(__name__)

MAX_VIEWERS = 64
"""Maximum number of concurrent streams; each keeps a connection open."""
TICK_S = 1.0
"""Interval of states."""
SAMPLE_EVERY = 5
HISTORY = 120
"""Number of kept samples: ten minutes. The producer also runs for ten minutes after the last viewer has left."""
_COMMENT_EVERY = 5
"""Turns without data after which a comment is sent, so that each side notices a broken connection."""
_CHECK_EVERY = 5
"""Ticks without a change after which a waiting stream checks whether the server or the producer has ended."""


class FleetBroadcast:
    """The streams of all viewers. It runs on the server's event loop.

    The producer never waits for a viewer. A slow viewer gets the newest state, and the events that are still kept. The
    streams end when `is_over` returns true, since they would keep the server from ending.
    """

    def __init__(self, view: FleetView, events: EventLog, is_over: Callable[[], bool], tick: float = TICK_S) -> None:
        self._view = view
        self._log = events
        self._is_over = is_over
        self._tick = tick
        self._count = 0
        self._changed = asyncio.Event()
        self._producer: asyncio.Task[None] | None = None
        self._state = b""
        self._samples: deque[dict[str, Any]] = deque(maxlen=HISTORY)

    @property
    def is_full(self) -> bool:
        """Whether the maximum of streams is reached. A stream counts from its first chunk on."""
        return self._count >= MAX_VIEWERS

    @property
    def is_producing(self) -> bool:
        """Whether there was a viewer within the last ten minutes."""
        return self._producer is not None and not self._producer.done()

    def state(self) -> dict[str, Any]:
        self._view.rates.read()
        return self._view.state()

    def events(self, after: str = "") -> list[FleetEvent]:
        """See `EventLog.after`."""
        return self._log.after(after)

    async def stream(self, after: str = "", *, with_state: bool = False) -> AsyncGenerator[bytes]:
        """Server-sent events: the kept events after one, then each new one; optionally history and states."""
        with self._viewer():
            yield message("history", list(self._samples)) if with_state else COMMENT
            sent, quiet = b"", 0
            async for _ in self._turns():
                events = self._log.after(after)
                chunk = b"".join(message(event.kind, asdict(event), event.id) for event in events)
                if events:
                    after = events[-1].id
                if with_state and self._state and self._state is not sent:
                    sent = self._state
                    chunk += sent
                quiet = 0 if chunk else quiet + 1
                if chunk:
                    yield chunk
                elif quiet % _COMMENT_EVERY == 0:
                    yield COMMENT

    @contextmanager
    def _viewer(self) -> Iterator[None]:
        self._count += 1
        self._keep_producing()
        try:
            yield
        finally:
            self._count -= 1
            if not self._count:
                # The next viewer must not get an old state.
                self._state = b""

    def _keep_producing(self) -> None:
        # A producer that was cancelled before its first step did not run its `finally`.
        if not self.is_producing:
            loop = asyncio.get_running_loop()
            self._log.on_event = partial(call_on, loop, self._notify)
            self._producer = loop.create_task(self._produce(), name="omni-broadcast")

    async def _turns(self) -> AsyncIterator[None]:
        """Yield now, and whenever there may be new data, until the server has stopped."""
        while not self._is_over():
            self._keep_producing()
            # Taken before the stream reads the data, so that a later change wakes it.
            changed = self._changed
            yield
            with suppress(TimeoutError):
                await asyncio.wait_for(changed.wait(), _CHECK_EVERY * self._tick)

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    async def _produce(self) -> None:
        """Make states while there are viewers, and samples until ten minutes after the last one has left."""
        turns = alone = 0
        failing = False
        try:
            # No await between this check and the end: a viewer that joins later finds no producer and starts one.
            while not self._is_over() and (self._count or alone < HISTORY * SAMPLE_EVERY):
                alone = 0 if self._count else alone + 1
                try:
                    self._update(is_sampled=turns % SAMPLE_EVERY == 0)
                    failing = False
                except Exception:
                    if not failing:
                        logger.exception("The state of the fleet cannot be shown; it is tried again every second.")
                    failing = True
                self._notify()
                turns += 1
                await asyncio.sleep(self._tick)
        finally:
            self._log.on_event = None
            self._samples.clear()
            self._view.rates.reset()
            self._notify()

    def _update(self, *, is_sampled: bool) -> None:
        sample = None
        if is_sampled or self._count:
            self._view.rates.read()
        if is_sampled:
            sample = self._view.sample()
            self._samples.append(sample)
        if self._count:
            self._state = message("state", {**self._view.state(), "sample": sample})
