"""On the first machine of a lockstep group over several: begins the meetings of the group, and ends them."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Executor
from contextlib import ExitStack, asynccontextmanager, closing

from vllm_omni_plugin.keep_running import Backoff, keep_running
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.control.control_link import ControlServer
from vllm_omni_plugin.replicas.control.lease_messages import FromServer, MachineReport, MeetingPlan, ToServer
from vllm_omni_plugin.replicas.engine.engine_keeper import finish
from vllm_omni_plugin.replicas.engine.engine_start import spawn
from vllm_omni_plugin.replicas.machines.group_machine import Coordination, RanksLauncher
from vllm_omni_plugin.replicas.machines.meeting_host import MeetingHost, listen_for_machines
from vllm_omni_plugin.replicas.machines.meetings import Meetings
from vllm_omni_plugin.replicas.machines.other_machine import MachineSettings, exit_of

logger = init_logger(__name__)

_LINGER_S = 0.2


class GroupLeader(MeetingHost):
    """Begins a meeting whenever all ranks of all machines wait for one. `settings` are those of the first machine.

    The ranks of a machine wait again after pauses of their own, so that failed meetings are not repeated at once.
    """

    def __init__(
        self,
        settings: MachineSettings,
        launcher: RanksLauncher,
        send: Callable[[bytes, FromServer], None],
        executor: Executor,
        clock: Callable[[], float],
    ) -> None:
        meetings = Meetings(
            launcher.machines, settings.setup, settings.timeout, tells_setup=settings.secrets is not None, first_rank=0
        )
        super().__init__(meetings, launcher.meeting_address, send, interval=settings.interval, clock=clock)
        self._launcher = launcher
        self._executor = executor
        self._broken = asyncio.Event()

    async def run(self) -> None:
        """Until cancelled."""
        await keep_running(self._meeting, Backoff(), self._clock, self._pause, must_start=lambda: False)

    @asynccontextmanager
    async def _meeting(self) -> AsyncIterator[Awaitable[str]]:
        await self._all_here()
        coordination = await spawn(self._executor, self._launcher.coordinate, lambda late: late.end())
        plan = MeetingPlan(
            secrets.randbelow(2**62 - 1) + 1, coordination.port, coordinator=list(coordination.addresses)
        )
        self._broken.clear()
        self._begin(plan)
        try:
            yield self._until_over(coordination)
        finally:
            self._end(plan.meeting)
            coordination.end()

    async def _until_over(self, coordination: Coordination) -> str:
        broken = asyncio.ensure_future(self._broken.wait())
        exited = asyncio.ensure_future(exit_of(coordination))
        try:
            await asyncio.wait({broken, exited}, return_when=asyncio.FIRST_COMPLETED)
            return self._meetings.broken or "vLLM's coordinator of the group ended"
        finally:
            broken.cancel()
            exited.cancel()

    async def _pause(self, seconds: float, reason: str | Exception) -> bool:
        if isinstance(reason, str):
            logger.warning("A meeting of the group has ended; the next one begins when all ranks wait: %s", reason)
        else:
            logger.warning("A meeting of the group failed, and is tried again in %.0f s: %s", seconds, reason)
            await asyncio.sleep(seconds)
        return True

    def _end_broken(self) -> None:
        self._broken.set()


@asynccontextmanager
async def leading(
    settings: MachineSettings, launcher: RanksLauncher, executor: Executor, clock: Callable[[], float]
) -> AsyncIterator[None]:
    """Let the machines of a group meet here. Raises ConfigError if this machine cannot listen for them."""

    def receive(peer: bytes, message: ToServer) -> None:
        if isinstance(message, MachineReport):
            leader.handle(peer, message)

    with closing(listen_for_machines(launcher.meeting_address)) as listener, ExitStack() as stack:
        control = ControlServer(listener, settings.secrets, receive, settings.timeout)
        stack.callback(control.close, _LINGER_S)
        leader = GroupLeader(settings, launcher, control.send, executor, clock)
        tasks = [asyncio.create_task(leader.run()), asyncio.create_task(leader.watch())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await finish(asyncio.gather(*tasks, return_exceptions=True))
