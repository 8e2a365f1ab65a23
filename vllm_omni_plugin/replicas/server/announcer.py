"""What one replica server tells the coordinator, and what it tells its operator when nobody listens there."""

import asyncio
import math
from collections.abc import Sequence
from concurrent.futures import Executor

from vllm_omni_plugin.coordinator import OmniCoordClientForStage, ReplicaStatus
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.server.server_settings import ServerSettings

logger = init_logger(__name__)

_REMIND_AFTER_S = 10.0

_complained_at: dict[tuple[str, str], float] = {}
"""When the operator was last told of an address and a reason, for all replicas of this process: they have one head."""


class Announcer:
    """Announces a replica from now on, as UP. Lives on the loop that made it.

    Args:
        settings: the node's.
        addresses: where heads attach, where the replica takes requests, and where it gives outputs.
        joined: set once the coordinator has been reached.
    """

    def __init__(self, settings: ServerSettings, addresses: Sequence[str], joined: asyncio.Event) -> None:
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
            secrets=settings.secrets,
            on_unreachable=self._reachability_changed_elsewhere,
        )

    @property
    def incarnation(self) -> int:
        """The number that heads must name when they attach."""
        return self._client.incarnation

    def say(self, status: ReplicaStatus, *, new_incarnation: bool = False) -> None:
        """Announce a status; `new_incarnation`: whoever was attached must attach anew."""
        self._client.update_info(status, new_incarnation=new_incarnation)

    async def close(self, executor: Executor) -> None:
        """Announce DOWN, and give the word up to two seconds to leave."""
        self._closed = True
        self._stop_reminding()
        await self._loop.run_in_executor(executor, self._client.close)

    def _reachability_changed_elsewhere(self, reason: str) -> None:
        self._loop.call_soon_threadsafe(self._reachability_changed, reason)

    def _reachability_changed(self, reason: str) -> None:
        self._stop_reminding()
        if not reason:
            logger.info("The head at %s is reached.", self._coordinator_addr)
            self._joined.set()
        elif not self._closed:
            self._complain(reason)

    def _complain(self, reason: str) -> None:
        now, complaint = self._loop.time(), (self._coordinator_addr, reason)
        # With some slack, since timers may come a little early.
        if now - _complained_at.get(complaint, -math.inf) > 0.9 * _REMIND_AFTER_S:
            _complained_at[complaint] = now
            logger.warning("The head at %s cannot be reached: %s. Trying on.", self._coordinator_addr, reason)
        self._reminder = self._loop.call_later(_REMIND_AFTER_S, self._complain, reason)

    def _stop_reminding(self) -> None:
        if self._reminder is not None:
            self._reminder.cancel()
            self._reminder = None
