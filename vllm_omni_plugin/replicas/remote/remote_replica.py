"""A remote replica: attaching to its replica server, renewing the lease, detecting its loss."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator import ReplicaInfo, ReplicaStatus, generation_of
from vllm_omni_plugin.coordinator.protocol.fleet_state import ReplicaState
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.control import lease_messages as wire
from vllm_omni_plugin.replicas.control.cache_polling import CachePollClient
from vllm_omni_plugin.replicas.control.control_link import ControlClient, open_control_link
from vllm_omni_plugin.replicas.kv_events.cache_listener import OnCacheChange
from vllm_omni_plugin.replicas.kv_events.engine_events import publishes_cache_events
from vllm_omni_plugin.replicas.links.connection import Context
from vllm_omni_plugin.replicas.links.engine_client import Codec, EngineClient
from vllm_omni_plugin.replicas.remote.remote_link import DataCredential, RemoteLink
from vllm_omni_plugin.replicas.remote.unreachable import why_unreachable

logger = init_logger(__name__)

_WINDOW_S = 60.0

_MAX_SOCKETS = 16384
"""A replica takes nine, monitor sockets included. ZMQ's default limit would allow 113 replicas."""
GRACE_S = 1.0
"""How long to wait for the server's status after the engine reported its death or its connection broke. Only the server
knows the engine's exit status, but its message may arrive later."""

LATE_SHARE = 1 / 3
"""Of the lease timeout: a replica is late after this time."""

OnOutputs = Callable[[Any], None]
OnStatus = Callable[[ReplicaStatus], None]


class ClockOffset:
    """Estimates the offset between a sender's monotonic clock and ours from the arrival times of its messages.

    Arrival time minus timestamp is the offset plus the transit time, so the smallest difference is the best estimate
    (NTP's clock filter, RFC 5905 section 10). Only the last one to two minutes count, since clocks drift.
    """

    def __init__(self) -> None:
        self._window_ends_at = 0.0
        self._smallest = self._smallest_before = float("inf")

    def observe(self, timestamp: float, now: float) -> float:
        """Add a message; returns the seconds to add to the sender's times."""
        if now >= self._window_ends_at:
            self._window_ends_at = now + _WINDOW_S
            self._smallest_before, self._smallest = self._smallest, float("inf")
        self._smallest = min(self._smallest, now - timestamp)
        return min(self._smallest, self._smallest_before)


class AttachRefusedError(ReplicaError):
    """The replica server refused the lease, see `AttachRefused`."""

    def __init__(self, refusal: wire.AttachRefused) -> None:
        super().__init__(refusal.reason)
        self.lasting, self.other_generation = refusal.lasting, refusal.other_generation
        self.machines = tuple(refusal.machines)


def _context_for_many() -> Context:
    context: Context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return context


@dataclass(frozen=True)
class AttachSettings:
    """Settings of all attachments of one head: codecs and fingerprints by stage, times in seconds.

    A lease is renewed every `heartbeat_interval`. A server is lost after `heartbeat_timeout` without an answer, which
    is also the limit for attaching, or `lease_timeout` without one of its machine; after a third of the latter without
    one of the server, the replica is late.
    """

    codecs: Mapping[int, Codec]
    head_id: str
    fingerprints: Mapping[int, Mapping[str, str]]
    heartbeat_interval: float
    heartbeat_timeout: float
    secrets: Secrets | None = None
    lease_timeout: float = OmniConfig().lease_timeout
    clock: Callable[[], float] = time.monotonic
    max_message_bytes: int = OmniConfig().max_message_bytes
    context: Context = field(default_factory=_context_for_many)


class RemoteReplica:
    """A lease of one replica. Made by `attach_remote`; lives on the loop that made it.

    `lost` is done with the reason when the lease or the engine has ended. The callbacks do nothing unless replaced:
    `on_lost` gets that reason, `on_late` whether the server answers late, `on_told` what another head has told the
    engine, `on_busy` whether some head has a call open that may block the engine for long. `sleeps`: it was paused or
    asleep when attached to.
    """

    client: EngineClient
    ready_response: bytes
    told: ReplicaState
    machines: tuple[str, ...]
    sleeps: bool

    def __init__(
        self, info: ReplicaInfo, replica_id: int, settings: AttachSettings, on_outputs: OnOutputs, on_status: OnStatus
    ) -> None:
        self._info = info
        self.incarnation = info.incarnation
        self._name = f"{info.stage_id}.{replica_id}"
        self._settings = settings
        self._on_status = on_status
        self._on_outputs = on_outputs
        self._offset = ClockOffset()
        loop = asyncio.get_running_loop()
        self.lost: asyncio.Future[str] = loop.create_future()
        self.on_lost: Callable[[str], None] = lambda reason: None
        self.on_late: Callable[[bool], None] = lambda late: None
        self.on_told: Callable[[ReplicaState], None] = lambda told: None
        self.on_busy: Callable[[bool], None] = lambda busy: None
        self._late = self._is_busy = False
        self._answer: asyncio.Future[wire.Attached | wire.AttachRefused] = loop.create_future()
        self._control: ControlClient | None = None
        self._lease: int | None = None
        self._link: RemoteLink | None = None
        self._unanswered = 0
        self._next_renewal: asyncio.TimerHandle | None = None
        self._cache_polls: CachePollClient | None = None

    async def attach(self) -> None:
        """Get a lease, open the data connections and wait for an answer of the engine, without a time limit."""
        settings = self._settings
        self._control = await open_control_link(
            settings.context,
            self._info.control_addr,
            settings.secrets,
            self._on_message,
            self._control_connection_lost,
            timeout=settings.lease_timeout,
        )
        credential = DataCredential.new(encrypted=settings.secrets is not None)
        self._control.send(
            wire.Attach(
                wire.PROTOCOL_VERSION,
                self._info.incarnation,
                settings.head_id,
                credential.public,
                dict(settings.fingerprints[self._info.stage_id]),
                self._info.replica_id,
                generation_of(settings.fingerprints),
            )
        )
        lease = await self._answer
        if isinstance(lease, wire.AttachRefused):
            raise AttachRefusedError(lease)
        await self._open(lease, credential)

    async def _open(self, lease: wire.Attached, credential: DataCredential) -> None:
        """Open the data connections of a lease; the engine must answer before it counts as attached."""
        settings = self._settings
        self._link = RemoteLink(
            settings.context, lease, credential, settings.max_message_bytes, self._data_connection_lost
        )
        self.ready_response, self.told, self.machines = lease.ready_response, lease.told, tuple(lease.machines)
        # The head's row may be older, if the coordinator was away when the server registered a new one.
        self.incarnation = max(self.incarnation, lease.incarnation)
        self.client = EngineClient(
            self._link,
            settings.codecs[self._info.stage_id],
            self._name,
            self._rebase,
            self._end,
            client_index=lease.client_index,
            grace=GRACE_S,
        )
        self._renew()
        await self._link.established()
        self.client.start()
        if self.lost.done():
            raise ReplicaError(self.lost.result())
        # Open connections do not prove that the engine is alive.
        self.sleeps = await self.client.call("is_sleeping") is True

    def subscribe_cache(self, on_change: OnCacheChange) -> None:
        """Report the engine's cached blocks, first all and then changes, if the engine reports them. Call once."""
        if not publishes_cache_events(self.ready_response):
            logger.info("Replica %s does not report what its prefix cache holds: it is estimated.", self._name)
        elif self._control is not None and self._lease is not None:
            self._cache_polls = CachePollClient(self._lease, self._control.send, on_change)

    async def why_late(self) -> str:
        address = self._info.control_addr
        seconds = f"within {self._settings.heartbeat_timeout:g} s"
        if self._control is None:
            return f"announced {address}, which {await why_unreachable(address)}"
        if self._link is None:
            return f"its server at {address} did not answer {seconds}"
        return f"its engine did not answer {seconds}"

    def report_told(self, told: ReplicaState) -> None:
        if self._control is not None and self._lease is not None:
            self._control.send(wire.StateTold(self._lease, told))

    def request_drain(self) -> None:
        """Ask the server to drain the replica, stop its engine and not restart it."""
        self._send(wire.DrainReplica)

    def close(self) -> None:
        """End the lease and close all sockets. The server aborts running requests. Idempotent."""
        if self._next_renewal is not None:
            self._next_renewal.cancel()
        self._answer.cancel()
        self.on_lost = lambda reason: None
        if self._link is not None:
            self.client.close()
        self._send(wire.Detach)
        self._lease = None
        if self._control is not None:
            self._control.close()

    def _send(self, kind: type[wire.DrainReplica] | type[wire.Detach]) -> None:
        if self._control is not None and self._lease is not None:
            self._control.send(kind(self._lease))

    def _on_message(self, message: wire.FromServer) -> None:
        """Handle a server's message. A status out of service, or the lease's end, loses the replica."""
        match message:
            case wire.Attached() | wire.AttachRefused():
                if not self._answer.done():
                    self._lease = message.lease if isinstance(message, wire.Attached) else None
                    self._answer.set_result(message)
            case wire.Status(lease=lease) if lease == self._lease:
                self._unanswered = 0
                self._set_late(False)
                if self._link is not None:
                    self.client.answered_at = self._settings.clock()
                if message.status in (ReplicaStatus.UP, ReplicaStatus.DRAINING):
                    self._on_status(message.status)
                    if message.busy is not self._is_busy:
                        self._is_busy = message.busy
                        self.on_busy(message.busy)
                else:
                    self._lose(message.reason or f"its server reports {message.status.value}", message.engine_failed)
            case wire.StateTold(lease=lease) if lease == self._lease:
                self.told = message.told
                self.on_told(message.told)
            case wire.CacheChanges(lease=lease) if lease == self._lease and self._cache_polls is not None:
                self._cache_polls.handle(message)
            case wire.Expired(lease=lease) if lease == self._lease:
                self._lose("its server has ended this head's lease")

    def _rebase(self, outputs: Any) -> None:
        """Convert all times to our clock: vLLM subtracts them, and a request that moved has times of two engines."""
        seconds = self._offset.observe(outputs.timestamp, self._settings.clock())
        outputs.timestamp += seconds
        for output in outputs.outputs:
            for event in output.events or ():
                event.timestamp += seconds
        self._on_outputs(outputs)

    def _renew(self) -> None:
        """Renew the lease. Unanswered messages are counted, not timed: a head that was late itself loses no replica."""
        assert self._control is not None
        assert self._lease is not None
        self._control.drain()
        if self.lost.done():
            return
        settings = self._settings
        silent_for = self._silent_for
        if silent_for >= settings.heartbeat_timeout:
            self._lose(f"its server has not answered for {settings.heartbeat_timeout:g} s")
            return
        self._set_late(silent_for >= settings.lease_timeout * LATE_SHARE)
        self._unanswered += 1
        self._control.send(wire.RenewLease(self._lease, self.client.is_busy))
        if self._cache_polls is not None:
            self._cache_polls.poll()
        self._next_renewal = asyncio.get_running_loop().call_later(settings.heartbeat_interval, self._renew)

    @property
    def _silent_for(self) -> float:
        return self._unanswered * self._settings.heartbeat_interval

    def _set_late(self, late: bool) -> None:
        if late is not self._late:
            self._late = late
            self.on_late(late)

    def _control_connection_lost(self) -> None:
        silence = f", which had not answered for {self._silent_for:g} s" if self._late else ""
        self._lose(f"the connection to its server broke{silence}")

    def _data_connection_lost(self) -> None:
        # Outputs that have arrived are valid and need not be computed again.
        self.client.drain()
        most = self._settings.max_message_bytes // 2**20
        self.client.mark_dead_after_grace(
            "the data connection to its server broke, "
            f"perhaps over an output of more than {most} MiB (--omni-max-message-size of this head)"
        )

    def _lose(self, reason: str, engine_failed: bool = False) -> None:
        """End the lease; outputs that have arrived are delivered first."""
        if self._link is not None:
            self.client.drain()
            self.client.mark_dead(reason, engine_failed)
        else:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if self.lost.done():
            return
        self._cache_polls = None
        self.lost.set_result(reason)
        if not self._answer.done():
            self._answer.set_exception(ReplicaError(reason))
        self.on_lost(reason)


async def attach_remote(
    info: ReplicaInfo, replica_id: int, settings: AttachSettings, on_outputs: OnOutputs, on_status: OnStatus
) -> RemoteReplica:
    """Attach to a replica; returns when its engine has answered.

    `on_outputs` gets times of our clock, `on_status` UP or DRAINING. Raises AttachRefusedError if the server refuses
    the lease, ReplicaError if it is lost or cannot be reached.
    """
    replica = RemoteReplica(info, replica_id, settings, on_outputs, on_status)
    try:
        async with asyncio.timeout(settings.heartbeat_timeout):
            await replica.attach()
    except TimeoutError:
        try:
            raise ReplicaError(await replica.why_late()) from None
        finally:
            replica.close()
    except BaseException:
        replica.close()
        raise
    return replica


AttachRemote = Callable[[ReplicaInfo, int, AttachSettings, OnOutputs, OnStatus], Awaitable[RemoteReplica]]
"""Signature of `attach_remote`."""
