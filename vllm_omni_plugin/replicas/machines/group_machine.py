"""A machine of a lockstep group over several: its ranks start and end with those of the other machines."""

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import zmq
from msgspec.structs import replace

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.control.lease_messages import MachineReport, MeetingPlan
from vllm_omni_plugin.replicas.engine.engine_start import Process
from vllm_omni_plugin.replicas.machines.meeting_host import LauncherOverMachines, ProcessOfMeeting
from vllm_omni_plugin.replicas.machines.other_machine import MachineSettings, OtherMachine

logger = init_logger(__name__)


class Coordination(Protocol):
    """What the ranks of one meeting share: vLLM's coordinator, and a store for torch; on the first machine."""

    port: int

    @property
    def addresses(self) -> Sequence[str]: ...

    @property
    def sentinel(self) -> int: ...

    def end(self) -> None:
        """Kill it. Does not block; idempotent."""


@runtime_checkable
class RanksLauncher(LauncherOverMachines, Protocol):
    """A `Launcher` of one machine's ranks, as `vllm_api.launch.group_launch.MachinesGroupLauncher`."""

    @property
    def ranks(self) -> int:
        """Number of those on this machine."""

    def coordinate(self) -> Coordination:
        """Start what the ranks of the next meeting share. Blocks. Raises ReplicaError if it does not start."""
        ...

    def meet_in(self, meeting: int, port: int, coordinator: Sequence[str]) -> None:
        """The meeting in which ranks are started next, and its `Coordination`."""

    def end_ranks(self) -> None:
        """Kill what is left of the ranks, and block until it has ended. Raises ReplicaError if it does not end."""


class MeetingRanks:
    """The ranks of one meeting on this machine; the `Workers` of an `OtherMachine`. Thread-safe.

    `on_drained` is called, from any thread, once all of them are to shut down. They then wait for `release`, since they
    still compute for those of other machines.
    """

    def __init__(self, launcher: RanksLauncher, on_drained: Callable[[], object]) -> None:
        self._launcher = launcher
        self._on_drained = on_drained
        self._changed = threading.Condition()
        self._processes: list[Process] = []
        self._leaving = 0
        self.may_leave = self._ended = False
        self._reason = ""
        # Readable when a rank has ended.
        self.sentinel = os.eventfd(0)
        weakref.finalize(self, os.close, self.sentinel)

    @property
    def drained(self) -> bool:
        return self._leaving == self._launcher.ranks

    def add(self, process: Process) -> None:
        """Raises ReplicaError if the meeting has ended."""
        with self._changed:
            self._processes.append(process)
            ended = self._ended
        if ended:
            process.abandon()
            raise ReplicaError(self._reason)

    def leave(self, timeout: float | None) -> None:
        """Block until the ranks of all machines are to shut down, at most so many seconds (None: no limit)."""
        with self._changed:
            self._leaving += 1
            if self.drained:
                self._on_drained()
            self._changed.wait_for(lambda: self.may_leave or self._ended, timeout)

    def release(self) -> None:
        """The ranks of all machines have finished."""
        with self._changed:
            self.may_leave = True
            self._changed.notify_all()

    def break_up(self, reason: str) -> None:
        """A rank has ended. That of one after `release` is no fault."""
        with self._changed:
            if not self.may_leave:
                self._reason = self._reason or reason
                os.eventfd_write(self.sentinel, 1)

    def exit_reason(self) -> str:
        return self._reason

    def end(self, reason: str = "its group was ended") -> None:
        with self._changed:
            self._ended, self._reason = True, self._reason or reason
            processes = list(self._processes)
            self._changed.notify_all()
        for process in processes:
            process.kill()
        self._launcher.end_ranks()


@dataclass
class RankOfMeeting(ProcessOfMeeting):
    """One rank; a `Process`."""

    ranks: MeetingRanks

    def exit_reason(self) -> str:
        return self.ranks.exit_reason() or self.process.exit_reason()

    def shutdown(self, timeout: float | None = None) -> None:
        if timeout != 0:
            self.ranks.leave(timeout)
        super().shutdown(timeout)

    def _end_meeting(self) -> None:
        self.ranks.break_up(self.process.exit_reason() or "a rank of its group ended")


class GroupMachine(OtherMachine):
    """One machine of the group, the first one as well: also the `Launcher` of its ranks, which start in meetings only.

    `drain` is called when a machine of the group was told to end: all its ranks are to finish their requests. On the
    first machine, `lead` lets the others meet while it runs.
    """

    def __init__(
        self,
        settings: MachineSettings,
        launcher: RanksLauncher,
        executor: Executor,
        clock: Callable[[], float],
        drain: Callable[[], None],
        lead: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__(settings, self._meet, executor, clock)
        self._launcher = launcher
        self._drain = drain
        self._lead = lead
        self._loop = asyncio.get_running_loop()
        self._waiting: dict[int, asyncio.Future[MeetingRanks]] = {}
        self._ranks: MeetingRanks | None = None
        self.ready_timeout, self.ready_timeout_variable = launcher.ready_timeout, launcher.ready_timeout_variable

    async def run(self, first_timeout: float) -> None:
        async with self._lead():
            await super().run(first_timeout)

    def identity(self, replica_id: int) -> bytes:
        return self._launcher.identity(replica_id)

    @asynccontextmanager
    async def turn(self, replica_id: int) -> AsyncIterator[None]:
        """Wait for a meeting, which begins when all ranks of all machines wait."""
        waiting = self._waiting[replica_id] = self._loop.create_future()
        self._changed.set()
        try:
            await waiting
            yield
        except BaseException as error:
            if waiting.cancelled():
                del self._waiting[replica_id]
            else:
                waiting.result().break_up(f"a rank of its group did not start: {str(error) or 'it was stopped'}")
            raise

    def group_of(self, replica_id: int) -> range:
        return range(self._launcher.ranks)

    def start(self, replica_id: int) -> RankOfMeeting:
        assert self._ranks is not None, "`turn` has returned"
        rank = RankOfMeeting(self._launcher.start(replica_id), self._ranks)
        self._ranks.add(rank.process)
        return rank

    def _meet(self, plan: MeetingPlan) -> MeetingRanks:
        self._launcher.meet_in(plan.meeting, plan.port, plan.coordinator)
        ranks = MeetingRanks(self._launcher, lambda: self._loop.call_soon_threadsafe(self._changed.set))
        self._loop.call_soon_threadsafe(self._let_in, ranks)
        return ranks

    def _let_in(self, ranks: MeetingRanks) -> None:
        """Let the waiting ranks start together; if one has stopped to wait, the meeting breaks up."""
        if not self._ready:
            ranks.break_up("a rank of its group stopped to wait for the others")
            return
        self._ranks = ranks
        for waiting in self._waiting.values():
            waiting.set_result(ranks)
        self._waiting.clear()

    @property
    def _ready(self) -> bool:
        return sum(not waiting.done() for waiting in self._waiting.values()) == self._launcher.ranks

    def _report(self) -> MachineReport:
        drained = self._attendance.running if self._ranks is not None and self._ranks.drained else 0
        return replace(super()._report(), ready=self._ready, drained=drained)

    async def _report_to_first(self, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        try:
            await super()._report_to_first(context)
        except ReplicaError:
            if self._ranks is None or not self._ranks.may_leave:
                raise
            logger.info("The first machine has ended; the ranks here end by themselves, and then this machine.")
            await self._loop.create_future()

    def _follow(self, plan: MeetingPlan) -> None:
        """Drain, leave or break up as the first machine says; ranks that may leave end by themselves."""
        if plan.drain:
            self._drain()
        if self._ranks is not None:
            if self._ranks.may_leave:
                # They end by themselves.
                return
            if plan.meeting and plan.meeting == self._attendance.running:
                if plan.leave:
                    self._ranks.release()
            elif plan.reason:
                self._ranks.break_up(plan.reason)
        super()._follow(plan)
