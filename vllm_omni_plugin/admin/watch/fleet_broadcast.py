"""Streams of the fleet's state and events: one producer for all viewers, and none once nobody has looked for long."""

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

logger = init_logger(__name__)

MAX_VIEWERS = 64
"""Streams at once; each keeps a connection."""
TICK_S = 1.0
"""Seconds between two states."""
_SAMPLE_EVERY = 5
_HISTORY = 120
"""Samples that are kept: ten minutes, as long as there are taken any after the last viewer has left."""
_COMMENT_EVERY = 5
"""Turns after which a viewer who was sent nothing is sent a comment: each can notice that the other one is gone."""
_LOOK_EVERY = 5
"""Ticks after which one who waits for news looks whether there will be any."""


class FleetBroadcast:
    """Who looks at the fleet, and what they are sent. Lives on the server's event loop.

    A viewer is never waited for. Each goes through states and events at its own speed: of states it gets the newest, of
    events those that are still kept, whose ids tell how many it has missed.

    Args:
        view: makes the state.
        events: has the events.
        is_over: whether the server serves nobody any more. Streams would keep it from ending.
        tick: seconds between two states.
    """

    def __init__(self, view: FleetView, events: EventLog, is_over: Callable[[], bool], tick: float = TICK_S) -> None:
        self._view = view
        self._log = events
        self._is_over = is_over
        self._tick = tick
        self._count = 0
        self._news = asyncio.Event()
        self._producer: asyncio.Task[None] | None = None
        self._state = b""
        self._samples: deque[dict[str, Any]] = deque(maxlen=_HISTORY)

    @property
    def is_full(self) -> bool:
        """Whether there can be no more. A stream counts from its first chunk on, for which it waits for nothing."""
        return self._count >= MAX_VIEWERS

    @property
    def is_producing(self) -> bool:
        """Whether somebody looks, or has looked within ten minutes."""
        return self._producer is not None and not self._producer.done()

    def state(self) -> dict[str, Any]:
        """The state, for one who asks once."""
        self._view.rates.read()
        return self._view.state()

    def events(self, after: str = "") -> list[FleetEvent]:
        """The events behind one, oldest first, as far as they are kept."""
        return self._log.after(after)

    def event_stream(self, after: str = "") -> AsyncGenerator[bytes]:
        """As server-sent events: the events behind one, and then each as it comes."""
        return self._stream(after, with_state=False)

    def fleet_stream(self, after: str = "") -> AsyncGenerator[bytes]:
        """As server-sent events: the history, then the events as in `event_stream`, and the newest state every tick."""
        return self._stream(after, with_state=True)

    async def _stream(self, after: str, *, with_state: bool) -> AsyncGenerator[bytes]:
        with self._viewer():
            yield message("history", list(self._samples)) if with_state else COMMENT
            sent, quiet = b"", 0
            async for _ in self._turns():
                events = self._log.after(after)
                news = b"".join(message(event.kind, asdict(event), event.id) for event in events)
                if events:
                    after = events[-1].id
                if with_state and self._state and self._state is not sent:
                    sent = self._state
                    news += sent
                quiet = 0 if news else quiet + 1
                if news:
                    yield news
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
                # The next one gets none that is old.
                self._state = b""

    def _keep_producing(self) -> None:
        """Start the producer, unless there is one. One that was cancelled before its first step has noticed nothing."""
        if not self.is_producing:
            loop = asyncio.get_running_loop()
            self._log.on_event = partial(self._tell, loop)
            self._producer = loop.create_task(self._produce(), name="omni-viewers")

    async def _turns(self) -> AsyncIterator[None]:
        """One turn now, and one whenever there may be something new, until the server is over."""
        while not self._is_over():
            self._keep_producing()
            # Before it looks for news: what comes from here on wakes it.
            news = self._news
            yield
            with suppress(TimeoutError):
                await asyncio.wait_for(news.wait(), _LOOK_EVERY * self._tick)

    def _tell(self, loop: asyncio.AbstractEventLoop) -> None:
        # Who notes an event on another thread may do so after this loop is closed.
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(self._announce)

    def _announce(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _produce(self) -> None:
        turns = alone = 0
        failing = False
        try:
            # Nothing is awaited between this look and the end: who joins later finds no producer, and starts one.
            while not self._is_over() and (self._count or alone < _HISTORY * _SAMPLE_EVERY):
                alone = 0 if self._count else alone + 1
                try:
                    self._take_turn(is_sampled=turns % _SAMPLE_EVERY == 0)
                    failing = False
                except Exception:
                    if not failing:
                        logger.exception("The state of the fleet cannot be shown; it is tried again every second.")
                    failing = True
                self._announce()
                turns += 1
                await asyncio.sleep(self._tick)
        finally:
            self._log.on_event = None
            self._samples.clear()
            self._view.rates.reset()
            self._announce()

    def _take_turn(self, *, is_sampled: bool) -> None:
        sample = None
        if is_sampled or self._count:
            self._view.rates.read()
        if is_sampled:
            sample = self._view.sample()
            self._samples.append(sample)
        if self._count:
            self._state = message("state", {**self._view.state(), "sample": sample})
