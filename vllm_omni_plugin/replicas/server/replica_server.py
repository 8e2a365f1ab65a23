"""A replica as the fleet sees it: an engine that is kept running, announced, and shared by the heads that attach."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextlib import AsyncExitStack
from functools import partial

from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.client.stage_client import Codec
from vllm_omni_plugin.replicas.control.control_link import ControlServer
from vllm_omni_plugin.replicas.engine.engine_keeper import EngineKeeper, Timing, finish
from vllm_omni_plugin.replicas.engine.engine_start import Launcher
from vllm_omni_plugin.replicas.links.replica_ports import REPLICA_PORTS, Listener, close_all, listen_on_ports
from vllm_omni_plugin.replicas.server.announcer import Announcer
from vllm_omni_plugin.replicas.server.attached_heads import AttachedHeads
from vllm_omni_plugin.replicas.server.served_engine import ServedEngine, start_served_engine
from vllm_omni_plugin.replicas.server.server_settings import ServerSettings

logger = init_logger(__name__)

_DETACH_GRACE_S = 2.0
_LAST_WORDS_S = 0.2


class ReplicaServer:
    """One replica of a node. Lives on the event loop on which it was made.

    Args:
        settings: the node's.
        launcher: starts the engine's process.
        index: which of the node's replicas.
        codec: see `StageClient`; for this server only.
        executor: where blocking steps run; two may at once.
        delay: sleeps between restarts of the engine.

    Attributes:
        ready: set once the engine is ready for the first time.
        joined: set once the coordinator was reached for the first time.
    """

    def __init__(
        self,
        settings: ServerSettings,
        launcher: Launcher,
        index: int,
        codec: Codec,
        executor: Executor,
        *,
        delay: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._settings = settings
        self._launcher = launcher
        self._index = index
        self._codec = codec
        self._executor = executor
        self._delay = delay
        self.ready = asyncio.Event()
        self.joined = asyncio.Event()
        self._leaving = False
        self._hurrying = False
        self._gone = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._addresses: list[str] = []
        self._announcer: Announcer | None = None
        self._heads: AttachedHeads | None = None
        self._keeper: EngineKeeper[ServedEngine] | None = None
        self._serving = False

    @property
    def control_addr(self) -> str:
        """Where heads attach; "" before `run`."""
        return self._addresses[0] if self._addresses else ""

    async def run(self) -> None:
        """Serve until drained or told to leave; everything is given back then, or when cancelled.

        Raises:
            ConfigError: an address or port cannot be bound.
            ReplicaError: the engine did not start the first time. Later it is started again and again.
        """
        async with AsyncExitStack() as stack:
            listeners = listen_on_ports(self._settings.host, self._settings.ports, REPLICA_PORTS)
            stack.callback(close_all, listeners)
            self._addresses = [listener.address for listener in listeners]
            stack.push_async_callback(self._close_announcer)
            heads = self._open(stack, listeners)
            stack.callback(asyncio.create_task(heads.watch()).cancel)
            keeper = self._keeper = self._keep_engine(heads)
            stack.push_async_callback(self._end_engine, keeper, heads)
            gone = asyncio.ensure_future(self._gone.wait())
            stack.callback(gone.cancel)
            await asyncio.wait({keeper.running, gone}, return_when=asyncio.FIRST_COMPLETED)
            if keeper.running.done():
                keeper.running.result()

    def drain(self) -> None:
        """Take no new heads, let those attached finish, and leave; at the latest when the drain timeout has passed."""
        if self._leaving or self._gone.is_set():
            return
        self._leaving = True
        self._say(ReplicaStatus.DRAINING)
        if self._heads is not None:
            self._heads.tell(ReplicaStatus.DRAINING, "it is leaving")
        if not self._serving or not self._heads:
            self._gone.set()
            return
        logger.info("Replica %d leaves when its %d heads have finished.", self._index, len(self._heads))
        timeout = self._settings.drain_timeout
        self._set_timer(timeout, partial(self.stop_now, f"its drain timeout of {timeout:g} s passed"))

    def disable_restarts(self) -> None:
        """Leave as soon as the engine that serves is lost, and at once if none serves."""
        if self._keeper is not None:
            self._keeper.disable_restarts()
        if not self._serving:
            self._gone.set()

    def stop_now(self, reason: str) -> None:
        """Leave without waiting for requests; heads get a moment to move them. Idempotent."""
        if self._hurrying or self._gone.is_set():
            return
        self._leaving = self._hurrying = True
        if self._heads is not None:
            self._heads.tell(ReplicaStatus.DOWN, reason)
        if not self._serving or not self._heads:
            self._gone.set()
            return
        self._set_timer(_DETACH_GRACE_S, self._gone.set)

    def _open(self, stack: AsyncExitStack, listeners: list[Listener]) -> AttachedHeads:
        control_listener, *first_ports = listeners
        control = ControlServer(control_listener, self._settings.secrets, lambda peer, said: heads.handle(peer, said))
        stack.callback(control.close, _LAST_WORDS_S)
        heads = AttachedHeads(
            self._settings,
            first_ports,
            control.send,
            lambda: 0 if self._announcer is None else self._announcer.incarnation,
            self.drain,
            self._alone,
            time.monotonic,
        )
        self._heads = heads
        return heads

    def _keep_engine(self, heads: AttachedHeads) -> EngineKeeper[ServedEngine]:
        settings = self._settings
        keeper = EngineKeeper(
            f"{settings.stage_id}.{self._index}",
            partial(start_served_engine, self._launcher, self._codec, self._executor, self._index),
            partial(self._up, heads),
            partial(self._suspend, heads),
            self._restarts,
            self._executor,
            Timing(settings.heartbeat_interval, settings.heartbeat_timeout, time.monotonic, self._delay),
        )
        keeper.begin()
        return keeper

    async def _end_engine(self, keeper: EngineKeeper[ServedEngine], heads: AttachedHeads) -> None:
        self._serving = False
        if heads:
            heads.turn_away(ReplicaStatus.DOWN, "it has left")
        heads.forget_engine()
        keeper.stop(None)
        await finish(asyncio.gather(keeper.running, return_exceptions=True))

    async def _up(self, heads: AttachedHeads, engine: ServedEngine) -> None:
        """A new engine is ready, or one that hung answers again: heads attach anew in either case."""
        if self._leaving:
            return
        if self._announcer is None:
            self._announcer = Announcer(self._settings, self._addresses, self.joined)
        else:
            self._announcer.say(ReplicaStatus.UP, new_incarnation=True)
        heads.admit(engine)
        self._serving = True
        self.ready.set()
        logger.info("Replica %d (process %d) serves at %s.", self._index, engine.pid, self.control_addr)

    def _suspend(self, heads: AttachedHeads, engine: ServedEngine, reason: str, hangs: bool) -> None:
        """The engine is lost or not to be trusted: every head must move its requests now."""
        self._serving = False
        logger.warning("Replica %d serves no more for now: %s", self._index, reason)
        # First: only this says how the engine ended, and a head detaches from a replica that is no longer listed.
        heads.turn_away(ReplicaStatus.ERROR, reason, engine.client.engine_failed)
        self._say(ReplicaStatus.ERROR)
        if not hangs:
            heads.forget_engine()
        if self._leaving:
            self._gone.set()

    def _restarts(self, seconds: float, reason: str | Exception) -> None:
        logger.warning("Replica %d is started again in %.0f s: %s", self._index, seconds, reason)

    def _alone(self) -> None:
        if self._leaving:
            self._gone.set()

    def _say(self, status: ReplicaStatus) -> None:
        if self._announcer is not None:
            self._announcer.say(status)

    async def _close_announcer(self) -> None:
        self._gone.set()
        if self._timer is not None:
            self._timer.cancel()
        if self._announcer is not None:
            await self._announcer.close(self._executor)

    def _set_timer(self, seconds: float, then: Callable[[], None]) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, then)
