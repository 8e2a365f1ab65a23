"""Another machine of a replica over several: runs its workers in the meetings that the first one begins."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from contextlib import closing, suppress
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import zmq

from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import OmniError, ReplicaError
from vllm_omni_plugin.keep_running import Backoff
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.control.control_link import open_control_link
from vllm_omni_plugin.replicas.control.lease_messages import (
    MAX_TEXT_CHARS,
    FromServer,
    MachineReport,
    MeetingPlan,
)
from vllm_omni_plugin.replicas.engine.engine_keeper import finish

logger = init_logger(__name__)

_LONGEST_PAUSE_S = 5.0
_LAST_WORD_S = 1.0
"""How long a machine that leaves waits until the first one has heard it, which may be in the same process."""


class Exits(Protocol):
    """`sentinel` is readable once it has ended."""

    @property
    def sentinel(self) -> int: ...


class Workers(Exits, Protocol):
    """The process with this machine's workers, such as `vllm_api.launch.machines_launch.WorkersProcess`."""

    def exit_reason(self) -> str: ...

    def end(self) -> None:
        """Kill it and its workers. Blocks until it has ended; idempotent."""


@dataclass(frozen=True)
class MachineSettings:
    """`first` is the address of the first machine. Times are seconds: it gets a report every `interval`; it is lost
    when it has not answered for `timeout`. `setup` as in `MachineReport`."""

    rank: int
    address: str
    first: str
    setup: Mapping[str, str]
    secrets: Secrets | None
    interval: float
    timeout: float


class Step(Enum):
    """What to do to the workers here."""

    START = "start"
    END = "end"


@dataclass
class Attendance:
    """The meeting that another machine takes part in. Nothing here waits or sends.

    `running`: its workers run, or still end; 0: none. `failed`: its workers ended without a word of the first machine,
    for the `reason`.
    """

    running: int = 0
    failed: int = 0
    reason: str = ""

    def follow(self, meeting: int) -> Step | None:
        """What to do when the first machine is in this meeting; 0: in none.

        Workers that have failed are not started again: the first machine begins a new meeting, in which nobody is left
        of the old one.
        """
        if self.running:
            return None if self.running == meeting else Step.END
        if meeting in (0, self.failed):
            return None
        self.running = meeting
        return Step.START

    def fail(self, reason: str) -> None:
        """Its workers end, and the first machine has not ended it."""
        self.failed, self.reason = self.running, reason[:MAX_TEXT_CHARS]

    def ended(self) -> None:
        """Nothing of it runs here any more."""
        self.running = 0


class OtherMachine:
    """Lives on one event loop. `start` starts the workers of a meeting, in the executor."""

    def __init__(
        self,
        settings: MachineSettings,
        start: Callable[[MeetingPlan], Workers],
        executor: Executor,
        clock: Callable[[], float],
    ) -> None:
        self._settings = settings
        self._start = start
        self._executor = executor
        self._clock = clock
        self._process = secrets.randbelow(2**62 - 1) + 1
        self._attendance = Attendance()
        self._refusal = ""
        self._work: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._leaving = False
        self._done = asyncio.Event()
        # The first machine has said that the replica drains.
        self._drains = asyncio.Event()
        self._answered_at = 0.0
        self._met = False

    def leave(self) -> None:
        """Ask the first machine to drain the replica, and return from `run` when this machine's workers have ended."""
        self._leaving = True
        self._changed.set()
        if not self._attendance.running:
            self._done.set()

    def stop_now(self) -> None:
        self._done.set()

    async def run(self, first_timeout: float) -> None:
        """Take part in meetings until left or stopped.

        Raises OmniError if the first machine refuses this one, or has not answered within `first_timeout` seconds
        (0: no limit) from now.
        """
        serving = asyncio.create_task(self._serve(first_timeout), name="omni-machine")
        done = asyncio.ensure_future(self._done.wait())
        try:
            await asyncio.wait({serving, done}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                serving.result()
        finally:
            done.cancel()
            serving.cancel()
            await finish(asyncio.gather(serving, self._end_work(), return_exceptions=True))

    async def _serve(self, first_timeout: float) -> None:
        """Report to the first machine again and again; what runs here ends whenever it is lost."""
        pauses = Backoff(longest=_LONGEST_PAUSE_S)
        begun_at = self._clock()
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            while True:
                linked_at = self._clock()
                try:
                    await self._report_to_first(context)
                except TimeoutError:
                    logger.info("The first machine of this replica does not answer at %s yet.", self._settings.first)
                except ReplicaError as error:
                    logger.warning("The first machine of this replica: %s", error)
                    if self._attendance.running:
                        # It may not have noticed, and the meeting must not go on with new workers here.
                        self._attendance.fail(f"it has lost the first machine: {error}")
                if first_timeout and not self._met and self._clock() - begun_at > first_timeout:
                    raise OmniError(
                        f"the first machine of this replica has not answered at {self._settings.first} within "
                        f"{first_timeout:g} s; check --master-addr, --master-port and --omni-secret-file"
                    )
                # Nothing of a meeting may go on without the first machine.
                await self._end_work()
                await asyncio.sleep(pauses.after(self._clock() - linked_at))
        except asyncio.CancelledError:
            if self._leaving and not self._drains.is_set():
                with suppress(TimeoutError, ReplicaError):
                    await finish(asyncio.wait_for(self._say_leaving(context), _LAST_WORD_S))
            raise
        finally:
            context.destroy(linger=0)

    async def _report_to_first(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Report until the first machine is lost. Raises TimeoutError if it cannot be reached."""
        settings = self._settings
        lost = asyncio.Event()

        def on_lost() -> None:
            lost.set()
            self._changed.set()

        async with asyncio.timeout(settings.timeout):
            link = await open_control_link(
                context, settings.first, settings.secrets, self._on_message, on_lost, timeout=settings.timeout
            )
        with closing(link):
            self._answered_at = self._clock()
            while not lost.is_set():
                self._changed.clear()
                link.send(self._report())
                due_at = self._clock() + settings.interval
                with suppress(TimeoutError):
                    async with asyncio.timeout(settings.interval):
                        await self._changed.wait()
                if self._refusal:
                    raise OmniError(f"the first machine, {settings.first}, refuses this one: {self._refusal}")
                now = self._clock()
                # As `MeetingHost.watch`: what came while this process did not run is read first.
                if now - self._answered_at > settings.timeout and now - due_at <= settings.interval:
                    raise ReplicaError(f"it has not answered for {settings.timeout:g} s")
        raise ReplicaError("the connection to it is lost")

    async def _say_leaving(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        """Tell the first machine, which may not have been reached before, and wait until it has heard."""
        settings = self._settings
        link = await open_control_link(context, settings.first, settings.secrets, self._on_message, lambda: None)
        with closing(link):
            link.send(self._report())
            await self._drains.wait()

    def _report(self) -> MachineReport:
        settings = self._settings
        return MachineReport(
            settings.rank,
            self._process,
            settings.address,
            dict(settings.setup),
            self._attendance.running,
            self._attendance.failed,
            self._attendance.reason,
            self._leaving,
        )

    def _on_message(self, message: FromServer) -> None:
        """Start or end workers as the first machine says; refused, this process ends."""
        if not isinstance(message, MeetingPlan):
            return
        self._answered_at, self._met = self._clock(), True
        self._refusal = message.refusal
        if message.drain:
            self._drains.set()
        if self._refusal:
            self._changed.set()
        else:
            self._follow(message)

    def _follow(self, plan: MeetingPlan) -> None:
        """Start or end workers as the first machine says; a machine that leaves starts none."""
        if self._leaving and not self._attendance.running:
            # Nobody would end what is started now.
            return
        match self._attendance.follow(plan.meeting):
            case Step.END:
                self._cancel_work()
            case Step.START:
                self._work = asyncio.create_task(self._run_workers(plan), name="omni-workers")
                # Not by the task itself: one that is cancelled at once never begins.
                self._work.add_done_callback(self._workers_ended)
                self._changed.set()

    def _cancel_work(self) -> None:
        # A second cancellation would interrupt the wait for the end.
        if self._work is not None and not self._work.done() and not self._work.cancelling():
            logger.info("This machine ends its workers.")
            self._work.cancel()

    async def _end_work(self) -> None:
        self._cancel_work()
        if self._work is not None:
            await asyncio.wait({self._work})

    async def _run_workers(self, plan: MeetingPlan) -> None:
        loop = asyncio.get_running_loop()
        starting = loop.run_in_executor(self._executor, self._start, plan)
        logger.info(
            "All machines of this replica are there: this one starts its workers (torch's store: port %d).", plan.port
        )
        try:
            workers = await asyncio.shield(starting)
            await exit_of(workers)
            self._fail(workers.exit_reason() or "its workers ended")
        except Exception as error:
            self._fail(f"its workers did not start: {error}")
        finally:
            await finish(self._end(starting))

    def _workers_ended(self, _: "asyncio.Task[None]") -> None:
        self._attendance.ended()
        self._changed.set()
        if self._leaving:
            self._done.set()

    def _fail(self, reason: str) -> None:
        logger.warning("This machine's workers ended: %s", reason)
        self._attendance.fail(reason)
        # At once, also if the workers take long to end: the engine waits for them.
        self._changed.set()

    async def _end(self, starting: "asyncio.Future[Workers]") -> None:
        with suppress(Exception):
            workers = await starting
            await asyncio.get_running_loop().run_in_executor(
                self._executor, _end_workers, workers, self._settings.interval
            )


def _end_workers(workers: Workers, pause: float) -> None:
    """Blocks until they have ended: before that a new meeting would have a half of this one."""
    while True:
        try:
            return workers.end()
        except Exception:
            logger.exception("The workers of a meeting could not be ended; this is tried again.")
            time.sleep(pause)


async def exit_of(process: Exits) -> None:
    loop = asyncio.get_running_loop()
    exited: asyncio.Future[None] = loop.create_future()

    def on_exit() -> None:
        loop.remove_reader(process.sentinel)
        if not exited.done():
            exited.set_result(None)

    loop.add_reader(process.sentinel, on_exit)
    try:
        await exited
    finally:
        loop.remove_reader(process.sentinel)
