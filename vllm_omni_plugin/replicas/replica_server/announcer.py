"""Announces a replica to the coordinator, and logs a warning while the coordinator cannot be reached."""

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import Executor

from vllm_omni_plugin.coordinator import OmniCoordClientForStage, ReplicaStatus
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.replica_server.server_settings import ReplicaIdentity, ServerSettings

logger = init_logger(__name__)

_REMIND_AFTER_S = 10.0

_warned_at: dict[tuple[str, str], float] = {}
"""Time of the last warning by address and reason, shared by all replicas of this process, which have the same head."""


class Announcer:
    """Announces a replica with its control, input and output address, at first as UP. For the loop that made it."""

    def __init__(
        self, settings: ServerSettings, addresses: Sequence[str], identity: ReplicaIdentity, joined: asyncio.Event
    ) -> None:
        self._coordinator_addr = settings.coordinator_addr
        self._joined = joined
        self._loop = asyncio.get_running_loop()
        self._reminder: asyncio.TimerHandle | None = None
        self._closed = False
        control_addr, input_addr, output_addr = addresses
        self._client = OmniCoordClientForStage(
            settings.coordinator_addr,
            input_addr,
            output_addr,
            settings.stage_id,
            heartbeat_interval=settings.heartbeat_interval,
            control_addr=control_addr,
            number=identity.number,
            host_slot=identity.host_slot,
            secrets=settings.secrets,
            on_unreachable=self._on_client_thread,
        )

    @property
    def incarnation(self) -> int:
        return self._client.incarnation

    def announce(self, status: ReplicaStatus, *, new_incarnation: bool = False) -> None:
        """With `new_incarnation`, all heads must attach again."""
        self._client.update_info(status, new_incarnation=new_incarnation)

    def announce_use(self, replica_id: int, in_use: bool) -> None:
        """Announce the id from now on, which the replica keeps at a new coordinator, and whether heads are attached."""
        self._client.announce_use(replica_id, in_use)

    async def close(self, executor: Executor) -> None:
        """Announce DOWN; takes up to two seconds."""
        self._closed = True
        self._stop_reminding()
        await self._loop.run_in_executor(executor, self._client.close)

    def _on_client_thread(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._reachability_changed, reason)

    def _reachability_changed(self, reason: str) -> None:
        self._stop_reminding()
        if not reason:
            logger.info("Connected to the head at %s.", self._coordinator_addr)
            self._joined.set()
        elif not self._closed:
            self._warn(reason)

    def _warn(self, reason: str) -> None:
        """Warn that the head cannot be reached, now and each `_REMIND_AFTER_S`, once for all replicas."""
        now, warning = self._loop.time(), (self._coordinator_addr, reason)
        # 0.9: timers may fire a little early.
        if now - _warned_at.get(warning, -math.inf) > 0.9 * _REMIND_AFTER_S:
            _warned_at[warning] = now
            logger.warning("The head at %s cannot be reached: %s. Retrying.", self._coordinator_addr, reason)
        self._reminder = self._loop.call_later(_REMIND_AFTER_S, self._warn, reason)

    def _stop_reminding(self) -> None:
        if self._reminder is not None:
            self._reminder.cancel()
            self._reminder = None
