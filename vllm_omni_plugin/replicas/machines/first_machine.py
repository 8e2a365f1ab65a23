"""The first machine of a replica over several: starts the engine when all have met, and ends it when one is lost."""

import asyncio
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol, runtime_checkable

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.control.lease_messages import FromServer, MachineReport, MeetingPlan
from vllm_omni_plugin.replicas.machines.meeting_host import LauncherOverMachines, MeetingHost, ProcessOfMeeting
from vllm_omni_plugin.replicas.machines.meetings import Meetings, setup_of

logger = init_logger(__name__)


@runtime_checkable
class MachinesLauncher(LauncherOverMachines, Protocol):
    """A `Launcher` of one engine over several machines, as `vllm_api.launch.machines_launch.MachinesLauncher`."""

    def next_start(self, replica_id: int) -> tuple[int, int]:
        """The number and the incarnation of the engine that is started next."""
        ...

    def meet_at(self, port: int) -> None:
        """The port of torch's store for the next start."""


@dataclass
class EngineOfMeeting(ProcessOfMeeting):
    """The engine; a `Process`.

    `on_end` ends the meeting, from any thread. `silent` names a machine that may be lost, or "". `broken`: why the
    meeting was ended.
    """

    on_end: Callable[[], None]
    silent: Callable[[], str]
    broken: str = ""

    def exit_reason(self) -> str:
        # An engine that has lost a machine reports an error of its own before that has been silent for long.
        return self.broken or self.process.exit_reason() or self.silent()

    def _end_meeting(self) -> None:
        self.on_end()


class FirstMachine(MeetingHost):
    """The `Launcher` of the replica's engine, also.

    `on_leaving` is called when another machine was told to end. A machine is lost after `timeout` seconds without a
    report. `was_broken`: why another machine made the last start fail, or "". For `tells_setup` see `Meetings`.
    """

    def __init__(
        self,
        launcher: MachinesLauncher,
        fingerprint: Mapping[str, str],
        send: Callable[[bytes, FromServer], None],
        on_leaving: Callable[[], None],
        *,
        interval: float,
        timeout: float,
        clock: Callable[[], float],
        tells_setup: bool = True,
    ) -> None:
        setup = setup_of(fingerprint, launcher.layout)
        meetings = Meetings(launcher.machines, setup, timeout, tells_setup)
        super().__init__(meetings, launcher.meeting_address, send, interval=interval, clock=clock)
        self._launcher = launcher
        self._on_leaving = on_leaving
        self._loop = asyncio.get_running_loop()
        self._process: EngineOfMeeting | None = None
        self.was_broken = ""
        self.ready_timeout, self.ready_timeout_variable = launcher.ready_timeout, launcher.ready_timeout_variable

    @property
    def machines(self) -> list[str]:
        """The addresses of all machines."""
        return [self._launcher.meeting_address[0], *self._meetings.addresses]

    def handle(self, peer: bytes, report: MachineReport) -> None:
        """A machine's report; one that leaves drains the whole replica."""
        super().handle(peer, report)
        if report.leaving and not self._meetings.refusal(report):
            self._on_leaving()

    def identity(self, replica_id: int) -> bytes:
        return self._launcher.identity(replica_id)

    @asynccontextmanager
    async def turn(self, replica_id: int) -> AsyncIterator[None]:
        """Wait until all machines are there, and begin a meeting. It goes on if the engine becomes ready."""
        await self._all_here()
        host, _ = self._launcher.meeting_address
        number, incarnation = self._launcher.next_start(replica_id)
        meeting = secrets.randbelow(2**62 - 1) + 1
        plan = MeetingPlan(meeting, free_port(host), number, incarnation)
        self._launcher.meet_at(plan.port)
        self._process = None
        self._begin(plan)
        try:
            yield
        except BaseException as error:
            broken = self.was_broken = self._meetings.broken
            self._end(meeting)
            if broken and isinstance(error, Exception):
                raise ReplicaError(broken) from error
            raise

    def start(self, replica_id: int) -> EngineOfMeeting:
        meeting = self._meetings.plan.meeting
        self._process = EngineOfMeeting(
            self._launcher.start(replica_id), partial(self._end_from_thread, meeting), self._silent
        )
        return self._process

    def _end_from_thread(self, meeting: int) -> None:
        self._loop.call_soon_threadsafe(self._end, meeting)

    def _end_broken(self) -> None:
        if self._process is not None:
            self._process.broken = self._meetings.broken
            try:
                self._process.kill()
            except Exception:
                logger.exception(
                    "The engine here could not be killed after another machine was lost; this is tried again."
                )
            else:
                self._process = None


def free_port(host: str) -> int:
    """A port on which nothing listens now."""
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as free:
        port: int = free.getsockname()[1]
        return port
