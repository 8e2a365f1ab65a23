"""The first machine's end of the links to the machines of a replica or lockstep group."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.control.lease_messages import FromServer, MachineReport, MeetingPlan
from vllm_omni_plugin.replicas.engine.engine_start import Launcher, Process
from vllm_omni_plugin.replicas.links.replica_ports import Listener, PortRange, listen_on_ports
from vllm_omni_plugin.replicas.machines.meetings import Meetings, Messages

logger = init_logger(__name__)

REMIND_AFTER_S = 30.0
_LATE_REPORTS = 2.0
"""Intervals of reports after which a machine may be the cause of an engine's error."""


class LauncherOverMachines(Launcher, Protocol):
    """A `Launcher` on the machines of a replica or lockstep group."""

    @property
    def machines(self) -> int:
        """Number of them."""

    @property
    def meeting_address(self) -> tuple[str, int]:
        """Host and port at which the first machine waits for the others."""

    @property
    def layout(self) -> Mapping[str, str]:
        """How the engine or group is divided, which must be the same on all machines."""


@dataclass
class ProcessOfMeeting(ABC):
    """A `Process` whose end ends its meeting on all machines."""

    process: Process

    @abstractmethod
    def _end_meeting(self) -> None:
        """From any thread; more than once."""

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def sentinel(self) -> int:
        return self.process.sentinel

    def wait(self, input_addr: str, output_addrs: Sequence[str]) -> None:
        self.process.wait(input_addr, output_addrs)

    def abandon(self) -> None:
        try:
            self.process.abandon()
        finally:
            self._end_meeting()

    def shutdown(self, timeout: float | None = None) -> None:
        try:
            self.process.shutdown(timeout)
        finally:
            self._end_meeting()

    def kill(self) -> None:
        try:
            self.process.kill()
        finally:
            self._end_meeting()


class MeetingHost(ABC):
    """Lets machines meet at `address`, a host and a port. Lives on one event loop.

    `send` sends to a peer of the control socket. Reports come every `interval` seconds.
    """

    def __init__(
        self,
        meetings: Meetings,
        address: tuple[str, int],
        send: Callable[[bytes, FromServer], None],
        *,
        interval: float,
        clock: Callable[[], float],
    ) -> None:
        self._meetings = meetings
        self._address = address
        self._send = send
        self._interval = interval
        self._clock = clock
        self._reported = asyncio.Event()

    def handle(self, peer: bytes, report: MachineReport) -> None:
        self._send_all(self._meetings.report(peer, report, self._clock()))
        self._reported.set()
        self._end_if_broken()

    async def watch(self) -> None:
        """Look for silent machines, until cancelled. Not if this process was late itself: it has reports to read."""
        while True:
            due_at = self._clock() + self._interval
            await asyncio.sleep(self._interval)
            now = self._clock()
            # Reports that came while this process did not run are read first.
            if now - due_at <= self._interval:
                self._meetings.tick(now)
            self._end_if_broken()

    @abstractmethod
    def _end_broken(self) -> None:
        """The meeting is broken; may be called more than once."""

    def _end_if_broken(self) -> None:
        if self._meetings.broken:
            self._end_broken()

    async def _all_here(self) -> None:
        """Wait for all machines; now and then the log names those that are missing."""
        reminded_at = float("-inf")
        while missing := self._meetings.missing(self._clock()):
            if self._clock() - reminded_at > REMIND_AFTER_S:
                reminded_at = self._clock()
                host, port = self._address
                logger.info("The replica waits at %s port %d for %s.", host, port, ", ".join(missing))
            self._reported.clear()
            try:
                async with asyncio.timeout(REMIND_AFTER_S):
                    await self._reported.wait()
            except TimeoutError:
                continue

    def _begin(self, plan: MeetingPlan) -> None:
        self._send_all(self._meetings.begin(plan))

    def _end(self, meeting: int) -> None:
        self._send_all(self._meetings.end(meeting))

    def _silent(self) -> str:
        return self._meetings.silent(self._clock(), _LATE_REPORTS * self._interval)

    def _send_all(self, messages: Messages) -> None:
        for peer, message in messages:
            self._send(peer, message)


def listen_for_machines(address: tuple[str, int]) -> Listener:
    """Raises ConfigError, with the flags, if this machine cannot listen there."""
    host, port = address
    try:
        (listener,) = listen_on_ports(host, PortRange(port, port), 1)
    except ConfigError as error:
        raise ConfigError(
            f"argument --master-addr: the first machine, --node-rank 0, waits for the others at {host} port {port} "
            # Without the flag that it names.
            f"(--master-port), and cannot: {str(error).partition(': ')[2]}"
        ) from error
    return listener
