"""Runs one replica of a node: keeps its engine running, announces it, and shares it between the attached heads."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from functools import partial

from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.control.control_link import ControlServer
from vllm_omni_plugin.replicas.control.lease_messages import MachineReport, ToServer
from vllm_omni_plugin.replicas.engine.engine_keeper import EngineKeeper, FirstStarts, Timing, finish
from vllm_omni_plugin.replicas.engine.engine_start import GroupedLauncher, Launcher
from vllm_omni_plugin.replicas.links.engine_client import Codec
from vllm_omni_plugin.replicas.links.replica_ports import REPLICA_PORTS, Listener, close_all, listen_on_ports
from vllm_omni_plugin.replicas.machines.first_machine import FirstMachine, MachinesLauncher
from vllm_omni_plugin.replicas.machines.group_machine import GroupMachine
from vllm_omni_plugin.replicas.machines.meeting_host import listen_for_machines
from vllm_omni_plugin.replicas.machines.meetings import report_interval
from vllm_omni_plugin.replicas.replica_server.announcer import Announcer
from vllm_omni_plugin.replicas.replica_server.attached_heads import AttachedHeads
from vllm_omni_plugin.replicas.replica_server.served_engine import ServedEngine, start_served_engine
from vllm_omni_plugin.replicas.replica_server.server_settings import NO_IDENTITY, ReplicaIdentity, ServerSettings

logger = init_logger(__name__)

_DETACH_GRACE_S = 2.0
LINGER_S = 0.2


class ReplicaServer:
    """One replica of a node. Lives on the event loop on which it was made.

    The codec is not shared with other servers. `executor` runs at most two blocking steps of it at the same time.
    `first_starts` are shared by all replicas of the stage on this node. `ready` is set once the engine is ready for the
    first time, `joined` once the coordinator was reached.
    """

    def __init__(
        self,
        settings: ServerSettings,
        launcher: Launcher,
        index: int,
        codec: Codec,
        executor: Executor,
        *,
        identity: ReplicaIdentity = NO_IDENTITY,
        first_starts: FirstStarts | None = None,
        delay: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self.launcher = launcher
        self._index = index
        self._codec = codec
        self._executor = executor
        self._identity = identity
        self._first_starts = first_starts or FirstStarts()
        self._delay = delay
        self._clock = clock
        self.ready = asyncio.Event()
        self.joined = asyncio.Event()
        self._draining = False
        self._stopping = False
        self._finished = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._addresses: list[str] = []
        self._announcer: Announcer | None = None
        self._heads: AttachedHeads | None = None
        self._machines: FirstMachine | None = None
        self._keeper: EngineKeeper[ServedEngine] | None = None
        self._serving = False
        self._replica_id = -1

    @property
    def control_addr(self) -> str:
        """The address at which heads attach; "" before `run`."""
        return self._addresses[0] if self._addresses else ""

    async def run(self) -> None:
        """Serve until drained, stopped or cancelled.

        Raises `ConfigError` if a port cannot be bound, and `ReplicaError` if the first starts of all engines of the
        stage on this node have failed. Other failures are retried.
        """
        async with AsyncExitStack() as stack:
            listeners = listen_on_ports(self._settings.host, self._settings.ports, REPLICA_PORTS)
            stack.callback(close_all, listeners)
            self._addresses = [listener.address for listener in listeners]
            stack.push_async_callback(self._close_announcer)
            heads = self._open(stack, listeners)
            stack.callback(asyncio.create_task(heads.expire_leases()).cancel)
            keeper = self._keeper = self._keep_engine(heads)
            stack.push_async_callback(self._end_engine, keeper, heads)
            finished = asyncio.ensure_future(self._finished.wait())
            stack.callback(finished.cancel)
            await asyncio.wait({keeper.running, finished}, return_when=asyncio.FIRST_COMPLETED)
            if keeper.running.done():
                keeper.running.result()

    def drain(self) -> None:
        """Refuse new heads and stop when the attached heads have finished, or after the drain timeout."""
        if self._draining or self._finished.is_set():
            return
        self._draining = True
        self._announce(ReplicaStatus.DRAINING)
        if self._heads is not None:
            self._heads.notify(ReplicaStatus.DRAINING, "it is draining")
        if not self._serving or not self._heads:
            self._finished.set()
            return
        logger.info(
            "Replica %s drains: it stops when the requests of its heads (%d) have ended.", self._name, len(self._heads)
        )
        timeout = self._settings.drain_timeout
        self._set_timer(timeout, partial(self.stop_now, f"its drain timeout of {timeout:g} s passed"))

    def disable_restarts(self) -> None:
        """Stop when the engine is lost, or now if no engine is in service."""
        if self._keeper is not None:
            self._keeper.disable_restarts()
        if not self._serving:
            self._finished.set()

    def stop_now(self, reason: str) -> None:
        """Stop without waiting for requests. Heads get two seconds to move them. Idempotent."""
        if self._stopping or self._finished.is_set():
            return
        self._draining = self._stopping = True
        if self._heads is not None:
            self._heads.notify(ReplicaStatus.DOWN, reason)
        if not self._serving or not self._heads:
            self._finished.set()
            return
        self._set_timer(_DETACH_GRACE_S, self._finished.set)

    def _open(self, stack: AsyncExitStack, listeners: list[Listener]) -> AttachedHeads:
        control_listener, *first_ports = listeners
        control = ControlServer(
            control_listener,
            self._settings.secrets,
            self._receive,
            self._settings.heartbeat_timeout,
        )
        stack.callback(control.close, LINGER_S)
        heads = AttachedHeads(
            self._settings,
            first_ports,
            control.send,
            name=lambda: self._name,
            incarnation=lambda: 0 if self._announcer is None else self._announcer.incarnation,
            on_drain=self.drain,
            on_last_disconnect=self._on_last_disconnect,
            on_attach=self._on_attach,
            clock=self._clock,
        )
        self._heads = heads
        if isinstance(self.launcher, MachinesLauncher):
            self._meet_others(stack, control, self.launcher)
        return heads

    def _meet_others(self, stack: AsyncExitStack, control: ControlServer, launcher: MachinesLauncher) -> None:
        """Let the other machines of this replica connect."""
        settings = self._settings
        listener = listen_for_machines(launcher.meeting_address)
        stack.callback(listener.close)
        control.listen(listener)
        self._machines = FirstMachine(
            launcher,
            settings.fingerprint,
            control.send,
            self.drain,
            interval=report_interval(settings.heartbeat_interval),
            timeout=settings.heartbeat_timeout,
            clock=self._clock,
            # Any peer may send a report to an open port, and must not learn what runs here.
            tells_setup=settings.secrets is not None,
        )
        stack.callback(asyncio.create_task(self._machines.watch()).cancel)

    def _receive(self, peer: bytes, message: ToServer) -> None:
        assert self._heads is not None
        if not isinstance(message, MachineReport):
            self._heads.handle(peer, message)
        elif self._machines is not None:
            self._machines.handle(peer, message)

    def _keep_engine(self, heads: AttachedHeads) -> EngineKeeper[ServedEngine]:
        settings = self._settings
        keeper = EngineKeeper(
            f"{settings.stage_id}.{self._index}",
            partial(start_served_engine, self._machines or self.launcher, self._codec, self._executor, self._index),
            partial(self._start_serving, heads),
            partial(self._suspend, heads),
            self._log_restart,
            self._executor,
            Timing(settings.heartbeat_interval, settings.heartbeat_timeout, self._clock, self._delay),
            self._must_start,
        )
        keeper.begin()
        return keeper

    def _must_start(self) -> bool:
        """Whether a failed first start ends the node. That another machine was lost meanwhile says nothing about it."""
        if isinstance(self.launcher, GroupMachine) or (self._machines is not None and self._machines.was_broken):
            return False
        return self._first_starts.failed(self)

    async def _end_engine(self, keeper: EngineKeeper[ServedEngine], heads: AttachedHeads) -> None:
        self._serving = False
        if heads:
            heads.detach_all(ReplicaStatus.DOWN, "it has stopped")
        heads.release_engine()
        keeper.stop(None)
        await finish(asyncio.gather(keeper.running, return_exceptions=True))

    async def _start_serving(self, heads: AttachedHeads, engine: ServedEngine) -> None:
        """Put an engine into service that is new, or that hung and answers again. Heads must attach again."""
        if self._draining:
            return
        if self._announcer is None:
            self._announcer = Announcer(self._settings, self._addresses, self._identity, self.joined)
        else:
            self._announcer.announce(ReplicaStatus.UP, new_incarnation=True)
        heads.admit(engine, () if self._machines is None else self._machines.machines)
        self._serving = True
        self._first_starts.succeeded()
        self.ready.set()
        logger.info("Replica %s (process %d) serves at %s.", self._name, engine.pid, self.control_addr)

    def _suspend(self, heads: AttachedHeads, engine: ServedEngine, reason: str, hangs: bool) -> None:
        """Take an engine out of service that is lost or hangs. Every head must move its requests now."""
        self._serving = False
        logger.warning("Replica %s is out of service: %s", self._name, reason)
        # Before the announcement: only this message has the exit status, and a head detaches from a replica that is no
        # longer listed.
        # The ranks of a lockstep group end with each other: that of one says nothing about its requests.
        failed = engine.client.engine_failed and not isinstance(self.launcher, GroupedLauncher)
        heads.detach_all(ReplicaStatus.ERROR, reason, failed)
        self._announce(ReplicaStatus.ERROR)
        if not hangs:
            heads.release_engine()
        if self._draining:
            self._finished.set()

    def _log_restart(self, seconds: float, reason: str | Exception) -> None:
        if self.ready.is_set():
            logger.warning("Replica %s is restarted in %.0f s: %s", self._name, seconds, reason)
        else:
            logger.warning(
                "Replica %s did not start; it is tried again in %.0f s, beside the others: %s",
                self._name,
                seconds,
                reason,
            )

    def _on_last_disconnect(self) -> None:
        """No head uses the replica: heads of other generations are told; a draining one ends."""
        self._announce_use(in_use=False)
        if self._draining:
            self._finished.set()

    @property
    def _name(self) -> str:
        """What users call it: until a head has attached, its place on this node."""
        if self._replica_id < 0:
            return f"{self._index} of this node"
        return f"{self._settings.stage_id}.{self._replica_id}"

    def _on_attach(self, replica_id: int) -> None:
        if replica_id not in (-1, self._replica_id):
            former, self._replica_id = self._name, replica_id
            logger.info("Replica %s is replica %s of the fleet, at %s.", former, self._name, self._addresses[1])
        self._announce_use(in_use=True)

    def _announce_use(self, in_use: bool) -> None:
        if self._announcer is not None:
            self._announcer.announce_use(self._replica_id, in_use)

    def _announce(self, status: ReplicaStatus) -> None:
        if self._announcer is not None:
            self._announcer.announce(status)

    async def _close_announcer(self) -> None:
        self._finished.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._announcer is not None:
            await self._announcer.close(self._executor)

    def _set_timer(self, seconds: float, then: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, then)
