"""Keeps one engine of this node in service: starts, probes and restarts it; or decides that its node must end."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.keep_running import Backoff, keep_running
from vllm_omni_plugin.replicas.engine.running_engine import Engine

_LONG_STEPS = 4.0
"""Limit of an answer, as a multiple of the longest answer seen: an engine answers between steps, and steps differ."""
_FADE = 0.99
"""Decay of the longest answer with each later one. Otherwise one compilation would hide all later hangs."""
LONG_CALL_S = 300.0
"""Limit of an answer while a long call is open."""


@dataclass(eq=False, repr=False)
class Probe:
    """Probes an engine periodically, one probe at a time, and reports hangs and recoveries.

    `interval` are the seconds between an answer and the next probe, `timeout` the least that count as a hang. `on_hang`
    gets the reason when an answer is overdue, see `limit`. `on_answer` is awaited when that answer has come, before the
    next probe.
    """

    engine: Engine
    interval: float
    timeout: float
    on_hang: Callable[[str], None]
    on_answer: Callable[[], Awaitable[None]]
    clock: Callable[[], float]
    _longest: float = field(default=0.0, init=False)
    _measures_steps: bool = field(default=True, init=False)
    """Whether the time of the current answer measures the engine's steps."""

    @property
    def limit(self) -> float:
        """Seconds without an answer that count as a hang.

        An answer after the limit is recorded as if it had taken the limit, so the next limit is four times as long.
        Otherwise the requests of a model with long steps would move from engine to engine without end.
        """
        return max(self.timeout, _LONG_STEPS * self._longest)

    async def run(self) -> str:
        """Probe until the engine is lost; returns the reason. An engine that refuses a probe is marked lost."""
        lost = self.engine.lost
        while not lost.done():
            await asyncio.wait({lost}, timeout=self.interval)
            if not lost.done():
                try:
                    await self._probe()
                except ReplicaError as error:
                    self.engine.mark_lost(f"its engine cannot be probed: {error}")
        return lost.result()

    async def _probe(self) -> None:
        """Ask the engine once; overdue, it counts as hung until it answers, later during a long call."""
        asked_at, limit = self.clock(), self.limit
        self._measures_steps = not self.engine.is_busy
        answer = asyncio.ensure_future(self.engine.client.probe())
        try:
            waited = limit
            is_overdue = not await self._arrives(answer, limit)
            # Looked at only now, because a head says up to an interval later that it has made a call.
            if is_overdue and self.engine.is_busy:
                self._measures_steps = False
                waited = max(limit, LONG_CALL_S)
                is_overdue = not await self._arrives(answer, waited - limit)
            if is_overdue:
                self.on_hang(f"its engine has not answered for {waited:.1f} s")
            await answer
            self.engine.client.answered_at = self.clock()
        finally:
            answer.cancel()
            # Its error has this frame, and the engine would be kept until garbage is collected.
            del answer
        self._longest *= _FADE
        if self._measures_steps:
            self._longest = max(self._longest, min(self.clock() - asked_at, limit))
        if is_overdue:
            await self.on_answer()

    async def _arrives(self, answer: "asyncio.Future[None]", timeout: float) -> bool:
        """Whether the answer arrives in time. Time in which this process did not run or read does not count."""
        while timeout > 0:
            # In parts: the engine may have stood still with this process, as in a snapshot of a virtual machine.
            part, waits_from = min(timeout, self.interval), self.clock()
            answered, _ = await asyncio.wait({answer}, timeout=part)
            if answered:
                return True
            if self.engine.client.is_reading and self.clock() - waits_from - part <= self.interval:
                timeout -= part
            else:
                self._measures_steps = False
        return False


E = TypeVar("E", bound=Engine)


@dataclass(frozen=True)
class Timing:
    """Times of an `EngineKeeper`: interval and timeout of its `Probe` in seconds, and the sleep between restarts."""

    heartbeat_interval: float
    heartbeat_timeout: float
    clock: Callable[[], float]
    delay: Callable[[float], Awaitable[None]] = asyncio.sleep


@dataclass(eq=False, repr=False)
class EngineKeeper(Generic[E]):
    """Starts an engine, probes it, and restarts it when it is lost.

    An engine that hangs is taken out of service but not killed, since a long step looks the same. It returns to service
    when it answers. `serve` puts an engine into service; if it raises, the engine is restarted. `suspend` takes it out
    at once, but not while it is shut down, and gets the reason and whether it hangs. `on_restart` gets the pause, in
    seconds, and the reason. `must_start` says whether the error of a failed first start ends the keeper.

    After `begin`: `ready` has the ready response of the first engine that serves; `tried` is done when the first start
    has ended; `running` when the engine is not restarted any more, or with the error of a start that must succeed.
    """

    name: str
    start: Callable[[], Awaitable[E]]
    serve: Callable[[E], Awaitable[None]]
    suspend: Callable[[E, str, bool], None]
    on_restart: Callable[[float, str | Exception], None]
    executor: Executor
    timing: Timing
    must_start: Callable[[], bool] = lambda: True
    ready: "asyncio.Future[bytes]" = field(init=False)
    tried: "asyncio.Future[None]" = field(init=False)
    running: "asyncio.Task[None]" = field(init=False)
    _restarting: bool = field(default=True, init=False)
    _grace: float | None = field(default=None, init=False)
    _stopping: bool = field(default=False, init=False)

    def begin(self) -> None:
        """Start the engine in the background, on the running loop. Call once."""
        loop = asyncio.get_running_loop()
        self.ready, self.tried = loop.create_future(), loop.create_future()
        keeping = keep_running(self._engine, Backoff(), self.timing.clock, self._pause, must_start=self.must_start)
        self.running = asyncio.create_task(keeping, name=f"omni-replica-{self.name}")

    def disable_restarts(self) -> None:
        self._restarting = False

    def stop(self, timeout: float | None) -> None:
        """Shut the engine down within `timeout` seconds (None: 15); await `running`. Idempotent."""
        # A second cancellation would interrupt the wait for a process that is just being spawned.
        if not self._stopping:
            self._stopping, self._grace = True, timeout
            self.running.cancel()

    @asynccontextmanager
    async def _engine(self) -> AsyncIterator[Awaitable[str]]:
        """Start an engine and put it into service, then watch it until it ends or hangs for good."""
        engine = await self.start()
        try:
            engine.on_lost = lambda reason: self.suspend(engine, reason, False)
            try:
                await self.serve(engine)
            except Exception as error:
                # Takes it out of service, if `serve` failed after it had put it there.
                engine.mark_lost(f"it could not be put into service: {error}")
                raise
            if not self.ready.done():
                self.ready.set_result(engine.ready_response)
            self._set_tried()
            timing = self.timing
            yield Probe(
                engine,
                timing.heartbeat_interval,
                timing.heartbeat_timeout,
                lambda reason: self.suspend(engine, reason, True),
                partial(self._resume, engine),
                timing.clock,
            ).run()
        finally:
            # A lost engine has no requests to finish, and neither have the other engines of its lockstep group.
            await finish(engine.close(self.executor, 0.0 if engine.client.is_dead else self._grace))

    async def _resume(self, engine: E) -> None:
        try:
            await self.serve(engine)
        except Exception as error:
            engine.mark_lost(f"it hung, and could not be put back into service: {error}")

    def _set_tried(self) -> None:
        if not self.tried.done():
            self.tried.set_result(None)

    async def _pause(self, seconds: float, reason: str | Exception) -> bool:
        self._set_tried()
        if self._restarting:
            self.on_restart(seconds, reason)
            await self.timing.delay(seconds)
        return self._restarting


async def finish(work: Awaitable[Any]) -> None:
    """Await work that must complete, even if the caller is cancelled meanwhile; the cancellation is raised after it."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled


class FirstStarts:
    """The first starts of the engines of one stage on one node.

    A node whose engines all fail has a wrong command line, or no GPU that works. Otherwise only the GPU of the failed
    engine is at fault, and the others serve.
    """

    def __init__(self, engines: int = 1) -> None:
        self._engines = engines
        self._failed: set[Hashable] = set()
        self._any_served = False

    def succeeded(self) -> None:
        self._any_served = True

    def failed(self, engine: Hashable) -> bool:
        """Whether no engine has served, and none is still in its first start."""
        self._failed.add(engine)
        return not self._any_served and len(self._failed) == self._engines
