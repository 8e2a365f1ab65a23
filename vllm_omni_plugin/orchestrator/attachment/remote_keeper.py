"""Keeps the head attached to one replica of another process, while it is listed or a lease lasts."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from vllm_omni_plugin.coordinator import ReplicaInfo, ReplicaStatus
from vllm_omni_plugin.coordinator.protocol.fleet_state import is_later
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.keep_running import Backoff, keep_running
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.event_log import EventKind
from vllm_omni_plugin.orchestrator.fleet_state.fleet_calls import FleetCalls
from vllm_omni_plugin.orchestrator.orchestrator import Orchestrator
from vllm_omni_plugin.orchestrator.pool.pool_member import (
    ASLEEP_CORDON,
    DRAIN_CORDON,
    LATE_CORDON,
    NO_HEAD,
    STALL_CORDON,
    PoolMember,
)
from vllm_omni_plugin.replicas.remote.remote_replica import AttachRefusedError, RemoteReplica

logger = init_logger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 5.0
ALL_HEADS_LEAVE_S = 2.0
"""Pause after all heads took a replica out. Its node resets the engine when the last head has left, so no head may
attach again before."""

FIRST_STALL_PAUSE_S = 1.0
LONGEST_STALL_PAUSE_S = 60.0
"""Pauses before a stalled replica is tried again."""

RemoteReplicaFactory = Callable[[int, int], Awaitable[Any]]
"""Attaches to the replica of this stage and id, and returns a `RemoteReplica`."""


class RemoteReplicaKeeper:
    """One listed replica and its member of the pool. Lives on the orchestrator's loop.

    For `accepts` see `RegisterRemoteReplica`. `on_gone` is called when the lease of a replica that is no longer listed
    ends. `joined`: it has ever served.
    """

    def __init__(
        self,
        orchestrator: Orchestrator,
        fleet_calls: FleetCalls,
        member: PoolMember,
        info: ReplicaInfo,
        *,
        accepts: bool,
        clock: Callable[[], float],
        delay: Callable[[float], Awaitable[None]],
        on_gone: Callable[[], None],
    ) -> None:
        self.member = member
        self.info = info
        self._orchestrator = orchestrator
        self._fleet_calls = fleet_calls
        self._pool = orchestrator.stage_pools[member.stage_id]
        self._accepts = accepts
        self._clock = clock
        self._delay = delay
        self._on_gone = on_gone
        self._changed = asyncio.Event()
        self._server_drains = self._late = False
        self.joined = self.unlisted = False
        self._replica: RemoteReplica | None = None
        self._last_failure = ""
        # From this head, in words, if it is of another generation.
        self._differences = ""
        self._stall_backoff = Backoff(FIRST_STALL_PAUSE_S, LONGEST_STALL_PAUSE_S)

    @property
    def attached(self) -> RemoteReplica | None:
        """The current attachment, if it serves."""
        return self._replica if self.member.client is not None else None

    def update(self, info: ReplicaInfo, accepts: bool) -> None:
        """Apply a row of the list, which may be unchanged. A server that restarts its engine ends the lease itself."""
        changed = _relevant(info, accepts) != _relevant(self.info, self._accepts)
        self.info, self._accepts, self.unlisted = info, accepts, False
        self._show_generation()
        if changed:
            self._changed.set()
            self._update_cordons()

    def on_outputs(self, outputs: Any) -> None:
        """Pass on outputs of the replica. Before it serves, they belong to no request of this head."""
        if self.member.client is not None:
            self._orchestrator.outputs_received(self.member, outputs)

    def on_status(self, status: ReplicaStatus) -> None:
        """Apply the status that the replica's node reports."""
        drains = status is ReplicaStatus.DRAINING
        if drains is not self._server_drains:
            self._server_drains = drains
            self._update_cordons()

    def _on_late(self, late: bool) -> None:
        self._late = late
        self._update_cordons()

    def _on_lost(self, reason: str) -> None:
        """Ignored before the replica serves, and if this head ends the attachment itself."""
        if self.attached is not None:
            self._orchestrator.replica_lost(self.member, reason)
        if self.unlisted:
            self._on_gone()

    async def run(self, attach: RemoteReplicaFactory) -> None:
        """Attach, serve, and attach again after a loss, until cancelled."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_PAUSE_S)
        attachment = partial(self._attachment, attach)
        await keep_running(attachment, backoff, self._clock, self._pause, must_start=lambda: False)

    @asynccontextmanager
    async def _attachment(self, attach: RemoteReplicaFactory) -> AsyncIterator[Awaitable[str]]:
        """Attach once the list says that the replica accepts requests, and serve; raises if it cannot serve."""
        while not self._accepts:
            self._changed.clear()
            await self._changed.wait()
        self._changed.clear()
        self._server_drains = False
        member = self.member
        replica: RemoteReplica = await attach(member.stage_id, member.replica_id)
        self._replica, self._differences, self._late = replica, "", False
        self._show_generation()
        replica.on_lost, replica.on_late = self._on_lost, self._on_late
        try:
            member.incarnation = replica.incarnation
            member.told = replica.told
            stage = self._orchestrator.stage_calls[member.stage_id]
            replica.on_told, replica.on_busy = partial(stage.told_elsewhere, member), partial(stage.set_busy, member)
            await self._fleet_calls.session.wait_synced()
            await self._orchestrator.prepare_replica(member, replica.client, replica.ready_response, replica.sleeps)
            if is_later(member.told, replica.told):
                replica.report_told(member.told)
            member.report_told = replica.report_told
            if replica.lost.done():
                raise ReplicaError("it was lost as soon as it was attached")
            self._serve(replica)
            # Shielded: cancelling the wait must not cancel `lost`.
            yield asyncio.shield(replica.lost)
        finally:
            self._replica = member.report_told = None
            member.is_busy = False
            replica.close()

    def _serve(self, replica: RemoteReplica) -> None:
        """Put an attached replica into service; cordoned if it sleeps though no call has asked for that."""
        member = self.member
        if not self.joined:
            self.joined = True
            self._orchestrator.replica_joined(member, replica.ready_response)
        member.machines = replica.machines
        self._update_cordons()
        sets_pause = self._orchestrator.stage_calls[member.stage_id].state.pause.was_set
        self._set_cordon(ASLEEP_CORDON, replica.sleeps and not sets_pause)
        self._orchestrator.replica_serves(
            member, replica.client, self.info.input_addr, self.info.output_addr, replica.ready_response
        )
        if self._pool.follows_caches:
            replica.subscribe_cache(partial(self._pool.cache_changed, member))
        self._await_drain()
        self._last_failure = ""
        self._stall_backoff = Backoff(FIRST_STALL_PAUSE_S, LONGEST_STALL_PAUSE_S)
        self._orchestrator.events.record(EventKind.ATTACH, f"attached to {self.info.control_addr}", member)

    def _update_cordons(self) -> None:
        """Cordon a replica that is late, or that drains according to its server, or before that to the list."""
        # That the coordinator does not hear from a replica whose lease lasts, says nothing about the replica.
        drains = self._server_drains or (not self._accepts and self.info.status is ReplicaStatus.DRAINING)
        self._set_cordon(LATE_CORDON, self._late)
        self._set_cordon(DRAIN_CORDON, drains)
        self._await_drain()

    def _set_cordon(self, reason: str, applies: bool) -> None:
        change = self._orchestrator.cordon if applies else self._orchestrator.uncordon
        change(self.member, reason)

    def _await_drain(self) -> None:
        if DRAIN_CORDON in self.member.cordons and self.member.client is not None:
            self._pool.when_idle(self.member).add_done_callback(self._detach_if_drained)

    def _detach_if_drained(self, idle: "asyncio.Future[None]") -> None:
        """Leave a draining replica once this head has nothing in flight there."""
        member, client = self.member, self.member.client
        if idle.cancelled() or client is None or member.in_flight or DRAIN_CORDON not in member.cordons:
            return
        logger.info("Replica %s has drained.", member.name)
        self._pool.lose(member, ReplicaStatus.DRAINING)
        client.mark_dead("it has drained")

    async def _pause(self, seconds: float, reason: str | Exception) -> bool:
        """Wait before the next attempt, or until the row changes; after a lasting refusal only that ends the wait."""
        refusal = reason if isinstance(reason, AttachRefusedError) else None
        self._differences = ""
        if refusal is not None and refusal.other_generation:
            self._differences, self.member.machines = str(refusal), refusal.machines
        self._show_generation()
        if STALL_CORDON in self.member.cordons:
            # Each head decides for itself.
            seconds = self._stall_backoff.after(0.0)
        elif isinstance(reason, str) and self._was_taken_out:
            await self._delay(ALL_HEADS_LEAVE_S)
            return True
        if self._differences:
            self._report(f"it is of another generation: {self._differences}", logging.INFO)
        elif isinstance(reason, Exception):
            level = logging.ERROR if refusal is not None and refusal.lasting else logging.WARNING
            self._report(str(reason) or repr(reason), level)
        if refusal is not None and refusal.lasting:
            # Until a restart of either end, after which the row is another one.
            await self._changed.wait()
            return True
        pause = asyncio.ensure_future(self._delay(seconds))
        changed = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait({pause, changed}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            pause.cancel()
            changed.cancel()
        return True

    def _show_generation(self) -> None:
        unused = f"; {NO_HEAD}" if self.info.in_use is False else ""
        self.member.other_generation = self._differences and self._differences + unused

    @property
    def _was_taken_out(self) -> bool:
        """Whether this head distrusts the replica, in which case the other heads take it out, too."""
        exchange = self._pool.exchange
        return self.member.status is ReplicaStatus.ERROR and exchange is not None and exchange.heads > 1

    def _report(self, text: str, level: int) -> None:
        """Record why attaching failed; the same reason again is only a debug line."""
        repeated, self._last_failure = text == self._last_failure, text
        if repeated:
            logger.debug("Replica %s still cannot be attached to: %s", self.member.name, text)
        else:
            self._orchestrator.events.record(EventKind.REFUSE, text, self.member, level=level)


def _relevant(info: ReplicaInfo, accepts: bool) -> tuple[bool, ReplicaStatus, int, str]:
    """The parts of a row that matter to a head; the others may change with every heartbeat."""
    return accepts, info.status, info.incarnation, info.control_addr
