"""Keeping one engine of this node in service, for the head or the replica server that has it, and probing it."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.keep_running import Backoff, keep_running
from vllm_omni_plugin.replicas.engine.running_engine import Engine

_LONG_STEPS = 4.0
"""How many times the longest answer seen an engine may take: it answers between steps only, and steps differ."""
_FADE = 0.99
"""What is left of the longest answer with each later one, or one compilation would hide every hang from then on."""
_LONG_CALL_S = 300.0
"""What an engine may take for a long call that it was sent before, in which it answers nothing."""


class Probe:
    """Asks an engine at intervals, once at a time, and says when it hangs and when it is back.

    Args:
        engine: is asked by `StageClient.probe`.
        interval: seconds between an answer and the next question.
        timeout: seconds an answer may take, unless answers that took long were seen; see `limit`.
        on_hang: called with the reason when an answer is overdue.
        on_answer: awaited when an overdue answer has come after all, before the next question.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        engine: Engine,
        interval: float,
        timeout: float,
        on_hang: Callable[[str], None],
        on_answer: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self._engine = engine
        self._client = engine.client
        self._interval = interval
        self._timeout = timeout
        self._on_hang = on_hang
        self._on_answer = on_answer
        self._clock = clock
        self._longest = 0.0
        # Whether the time of the answer that is awaited says something of the engine's steps.
        self._is_fair = True

    @property
    def limit(self) -> float:
        """Seconds after which a question that is not answered means a hang.

        An answer that came later than that counts as one that took so long: what looked like a hang may have been one
        of many long steps, and then requests would move from one engine to the next and end nowhere.
        """
        return max(self._timeout, _LONG_STEPS * self._longest)

    async def run(self) -> str:
        """Probe until the engine is lost; returns the reason. An engine that fails the question is given up."""
        lost = self._engine.lost
        while not lost.done():
            await asyncio.wait({lost}, timeout=self._interval)
            if not lost.done():
                try:
                    await self._ask()
                except ReplicaError as error:
                    self._engine.mark_lost(f"its engine cannot be probed: {error}")
        return lost.result()

    async def _ask(self) -> None:
        asked_at, limit, is_busy = self._clock(), self.limit, self._client.is_busy
        patience = max(limit, _LONG_CALL_S) if is_busy else limit
        self._is_fair = not is_busy
        answer = asyncio.ensure_future(self._client.probe())
        try:
            is_overdue = not await self._comes(answer, patience)
            if is_overdue:
                self._on_hang(f"its engine has not answered for {patience:.1f} s")
            await answer
            self._client.answered_at = self._clock()
        finally:
            answer.cancel()
        self._longest *= _FADE
        if self._is_fair:
            self._longest = max(self._longest, min(self._clock() - asked_at, limit))
        if is_overdue:
            await self._on_answer()

    async def _comes(self, answer: "asyncio.Future[None]", patience: float) -> bool:
        """Whether the answer comes in time. Time in which this process could not have read it does not count."""
        while True:
            waits_from = self._clock()
            answered, _ = await asyncio.wait({answer}, timeout=patience)
            if answered:
                return True
            late_by = self._clock() - waits_from - patience
            if self._client.is_reading and late_by <= self._interval:
                return False
            self._is_fair = False


E = TypeVar("E", bound=Engine)


@dataclass(frozen=True)
class Timing:
    """What keepers go by.

    Attributes:
        heartbeat_interval: seconds between questions to an engine whether it still answers.
        heartbeat_timeout: seconds without an answer after which it hangs; see `Probe`.
        clock: monotonic seconds.
        delay: sleeps between restarts.
    """

    heartbeat_interval: float
    heartbeat_timeout: float
    clock: Callable[[], float]
    delay: Callable[[float], Awaitable[None]] = asyncio.sleep


class EngineKeeper(Generic[E]):
    """Starts an engine, asks it at intervals whether it answers, and starts it again when it is lost.

    An engine that hangs is taken out of service but not killed, since a long step looks the same. It is put back into
    service when it has answered.

    Args:
        name: of the replica, for the name of the task.
        start: starts the engine and returns when it is ready.
        serve: puts an engine into service that is new, or that hung and has answered. If it raises, the engine is
            ended and started again.
        withdraw: takes it out of service, told the reason and whether it hangs. Called in the step in which that is
            known, and not while the engine is ended in order.
        on_restart: told in how many seconds an engine is started again that was lost or did not start, and why.
        executor: where its end is waited for.
        timing: how often to ask, and when to restart.

    Attributes:
        ready: done with the engine once the first one serves; as `running`, there from `begin` on.
        running: the task that keeps it; done when the engine is not to be started again, or with the error of the
            first start.
    """

    ready: "asyncio.Future[E]"
    running: "asyncio.Task[None]"

    def __init__(
        self,
        name: str,
        start: Callable[[], Awaitable[E]],
        serve: Callable[[E], Awaitable[None]],
        withdraw: Callable[[E, str, bool], None],
        on_restart: Callable[[float, str | Exception], None],
        executor: Executor,
        timing: Timing,
    ) -> None:
        self._name = name
        self._start = start
        self._serve = serve
        self._withdraw = withdraw
        self._on_restart = on_restart
        self._executor = executor
        self._timing = timing
        self._restarting = True
        self._grace: float | None = None
        self._stopping = False

    def begin(self) -> None:
        """Start the engine in the background, on the running loop. To be called once."""
        self.ready = asyncio.get_running_loop().create_future()
        keeping = keep_running(self._engine, Backoff(), self._timing.clock, self._pause)
        self.running = asyncio.create_task(keeping, name=f"omni-replica-{self._name}")

    def disable_restarts(self) -> None:
        """An engine that is lost from here on stays away."""
        self._restarting = False

    def stop(self, timeout: float | None) -> None:
        """End the engine, which has `timeout` seconds (None: vLLM's default); see `running`. Idempotent."""
        # A second cancellation would break off the waiting for a process that is just being spawned.
        if not self._stopping:
            self._stopping, self._grace = True, timeout
            self.running.cancel()

    @asynccontextmanager
    async def _engine(self) -> AsyncIterator[Awaitable[str]]:
        engine = await self._start()
        try:
            engine.on_lost = lambda reason: self._withdraw(engine, reason, False)
            await self._serve(engine)
            if not self.ready.done():
                self.ready.set_result(engine)
            timing = self._timing
            yield Probe(
                engine,
                timing.heartbeat_interval,
                timing.heartbeat_timeout,
                lambda reason: self._withdraw(engine, reason, True),
                partial(self._take_back, engine),
                timing.clock,
            ).run()
        finally:
            # One that was lost has nothing to finish; nor have, in a lockstep group, those that are lost with it.
            await finish(engine.close(self._executor, 0.0 if engine.lost.done() else self._grace))

    async def _take_back(self, engine: E) -> None:
        try:
            await self._serve(engine)
        except Exception as error:
            engine.mark_lost(f"it hung, and could not be taken back: {error}")

    async def _pause(self, seconds: float, reason: str | Exception) -> bool:
        if self._restarting:
            self._on_restart(seconds, reason)
            await self._timing.delay(seconds)
        return self._restarting


async def finish(work: Awaitable[Any]) -> None:
    """Wait for what may not be left half done, however often the caller is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
