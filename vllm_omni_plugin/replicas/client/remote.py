"""A replica behind a replica server: attaching to it, staying attached, noticing its loss."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import zmq

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.coordinator import ReplicaInfo, ReplicaStatus
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.client.remote_link import DataCredential, RemoteLink
from vllm_omni_plugin.replicas.client.stage_client import Codec, StageClient
from vllm_omni_plugin.replicas.client.unreachable import why_unreachable
from vllm_omni_plugin.replicas.control.cache_polling import CachePollClient
from vllm_omni_plugin.replicas.control.control_link import ControlClient, open_control_link
from vllm_omni_plugin.replicas.control.lease_messages import (
    PROTOCOL_VERSION,
    Attach,
    Attached,
    AttachRefused,
    CacheChanges,
    Detach,
    DrainReplica,
    Expired,
    FromServer,
    RenewLease,
    StateSynced,
    Status,
)
from vllm_omni_plugin.replicas.kv_events.cache_listener import OnCacheChange
from vllm_omni_plugin.replicas.kv_events.engine_events import publishes_cache_events
from vllm_omni_plugin.replicas.links.connection import Context

logger = init_logger(__name__)

_WINDOW_S = 60.0

_MAX_SOCKETS = 16384
"""Nine for each replica, with those that watch the others; ZMQ's own limit would end at 113 replicas."""
_SERVER_SAYS_WHY_S = 1.0
"""An engine's own word of its death and the end of its connections take shorter ways; its server knows how it ended."""

OnOutputs = Callable[[Any], None]
OnStatus = Callable[[ReplicaStatus], None]


class ClockOffset:
    """Estimates how far a sender's monotonic clock is behind ours, from the times at which its messages arrive.

    Each message says that the offset is at most its arrival minus its timestamp, the excess being its time on the way;
    the smallest of many is closest to the truth (as in NTP's clock filter, RFC 5905 section 10). Only the last one to
    two minutes count, since clocks drift apart.
    """

    def __init__(self) -> None:
        self._window_ends_at = 0.0
        self._smallest = self._smallest_before = float("inf")

    def observe(self, timestamp: float, now: float) -> float:
        """Seconds to add to the sender's times, given a message of `timestamp` that arrived at `now`."""
        if now >= self._window_ends_at:
            self._window_ends_at = now + _WINDOW_S
            self._smallest_before, self._smallest = self._smallest, float("inf")
        self._smallest = min(self._smallest, now - timestamp)
        return min(self._smallest, self._smallest_before)


def rebase(outputs: Any, offset: ClockOffset, now: float) -> None:
    """Tell all times of an `EngineCoreOutputs` that arrived at `now` in our clock.

    vLLM takes intervals between them, and a request that moved has times of two engines.
    """
    seconds = offset.observe(outputs.timestamp, now)
    outputs.timestamp += seconds
    for output in outputs.outputs:
        if output.events:
            for event in output.events:
                event.timestamp += seconds


class AttachRefusedError(ReplicaError):
    """The replica's server said no.

    Attributes:
        lasting: asking again is of no use until one end is started anew.
    """

    def __init__(self, reason: str, lasting: bool) -> None:
        super().__init__(reason)
        self.lasting = lasting


def attaching_context() -> Context:
    """A context for the sockets of many replicas."""
    context: Context = zmq.Context()
    context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
    return context


@dataclass(frozen=True)
class AttachSettings:
    """What all attachments of one head have in common.

    Attributes:
        codecs: see `StageClient`; by stage.
        head_id: names this process to servers and in their logs; no other has it.
        fingerprints: this head's configuration by stage, see `vllm_api.launch.model_fingerprint`.
        heartbeat_interval: seconds between signs of life.
        heartbeat_timeout: seconds without one after which a server is lost; also how long attaching may take.
        max_message_bytes: the largest message of an engine.
        secrets: what servers and heads of this fleet know, None where links are open.
        clock: monotonic seconds.
        context: makes the sockets, nine for each replica.
    """

    codecs: Mapping[int, Codec]
    head_id: str
    fingerprints: Mapping[int, Mapping[str, str]]
    heartbeat_interval: float
    heartbeat_timeout: float
    secrets: Secrets | None = None
    clock: Callable[[], float] = time.monotonic
    max_message_bytes: int = OmniConfig().max_message_bytes
    context: Context = field(default_factory=attaching_context)


class RemoteReplica:
    """A lease of one replica. Made by `attach_remote`; lives on the loop that made it.

    Attributes:
        client: speaks to the engine.
        ready_response: what the engine said of itself when it was ready, as vLLM encoded it.
        incarnation: the one that this is a lease of.
        synced: whether another head has told the engine what operators have told the fleet.
        lost: done with the reason when the lease has ended, or the engine.
        on_lost: called with the reason in the same step; does nothing unless replaced.
    """

    client: StageClient
    ready_response: bytes
    synced: bool

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
        self.on_lost: Callable[[str], None] = _nothing
        self._answer: asyncio.Future[Attached | AttachRefused] = loop.create_future()
        self._control: ControlClient | None = None
        self._lease: int | None = None
        self._link: RemoteLink | None = None
        self._beats_unanswered = 0
        self._next_beat: asyncio.TimerHandle | None = None
        self._follower: CachePollClient | None = None

    async def attach(self) -> None:
        """Get a lease, open the data connections, see the engine answer. Not limited in time.

        Raises:
            AttachRefusedError: the server said no.
            ReplicaError: the server or its engine is lost, or the handshake was refused.
        """
        settings = self._settings
        self._control = await open_control_link(
            settings.context,
            self._info.control_addr,
            settings.secrets,
            self._on_message,
            lambda: self._lose("the connection to its server broke"),
        )
        credential = DataCredential.new(encrypted=settings.secrets is not None)
        self._control.send(
            Attach(
                PROTOCOL_VERSION,
                self._info.incarnation,
                settings.head_id,
                credential.public,
                dict(settings.fingerprints[self._info.stage_id]),
            )
        )
        lease = await self._answer
        if isinstance(lease, AttachRefused):
            raise AttachRefusedError(lease.reason, lease.lasting)
        await self._open(lease, credential)

    async def _open(self, lease: Attached, credential: DataCredential) -> None:
        settings = self._settings
        self._link = RemoteLink(
            settings.context, lease, credential, settings.max_message_bytes, self._data_connection_lost
        )
        self.ready_response, self.synced = lease.ready_response, lease.synced
        self.client = StageClient(
            self._link,
            settings.codecs[self._info.stage_id],
            self._name,
            self._rebase,
            self._end,
            lease.client_index,
            _SERVER_SAYS_WHY_S,
        )
        self._beat()
        await self._link.established()
        self.client.start()
        if self.lost.done():
            raise ReplicaError(self.lost.result())
        # Connections that are open prove nothing of the engine behind them.
        await self.client.call("is_sleeping")

    def subscribe_cache(self, on_change: OnCacheChange) -> None:
        """Tell what the engine has cached, all of it and then what changes, if it reports that. Once, when attached."""
        if not publishes_cache_events(self.ready_response):
            logger.info("Replica %s does not report what its prefix cache holds.", self._name)
        elif self._control is not None and self._lease is not None:
            self._follower = CachePollClient(self._lease, self._control.send, on_change)

    async def why_late(self) -> str:
        """What attaching was waiting for, for the log of a head that gave up."""
        address = self._info.control_addr
        seconds = f"within {self._settings.heartbeat_timeout:g} s"
        if self._control is None:
            return f"announced {address}, which {await why_unreachable(address)}"
        if self._link is None:
            return f"its server at {address} did not answer {seconds}"
        return f"its engine did not answer {seconds}"

    def report_synced(self) -> None:
        """Other heads need not tell the engine what operators have told the fleet."""
        self._say(StateSynced)

    def leave(self) -> None:
        """Tell the server to end the engine, for good, once its heads are done with it."""
        self._say(DrainReplica)

    def close(self) -> None:
        """Give the lease back and free everything. What still runs is aborted by the server. Idempotent."""
        if self._next_beat is not None:
            self._next_beat.cancel()
        self._answer.cancel()
        self.on_lost = _nothing
        if self._link is not None:
            self.client.close()
        self._say(Detach)
        self._lease = None
        if self._control is not None:
            self._control.close()

    def _say(self, kind: type[StateSynced] | type[DrainReplica] | type[Detach]) -> None:
        if self._control is not None and self._lease is not None:
            self._control.send(kind(self._lease))

    def _on_message(self, message: FromServer) -> None:
        match message:
            case Attached() | AttachRefused():
                if not self._answer.done():
                    self._lease = message.lease if isinstance(message, Attached) else None
                    self._answer.set_result(message)
            case Status(lease=lease) if lease == self._lease:
                self._beats_unanswered = 0
                if self._link is not None:
                    self.client.answered_at = self._settings.clock()
                if message.status in (ReplicaStatus.UP, ReplicaStatus.DRAINING):
                    self._on_status(message.status)
                else:
                    self._lose(message.reason or f"its server says {message.status.value}", message.engine_failed)
            case CacheChanges(lease=lease) if lease == self._lease and self._follower is not None:
                self._follower.take(message)
            case Expired(lease=lease) if lease == self._lease:
                self._lose("its server has ended this head's lease")

    def _rebase(self, outputs: Any) -> None:
        rebase(outputs, self._offset, self._settings.clock())
        self._on_outputs(outputs)

    def _beat(self) -> None:
        """Ask for a sign of life. Beats without answer are counted, so a head that was itself late blames nobody."""
        assert self._control is not None
        assert self._lease is not None
        self._control.drain()
        if self.lost.done():
            return
        settings = self._settings
        if self._beats_unanswered * settings.heartbeat_interval >= settings.heartbeat_timeout:
            self._lose(f"its server has not answered for {settings.heartbeat_timeout:g} s")
            return
        self._beats_unanswered += 1
        self._control.send(RenewLease(self._lease))
        if self._follower is not None:
            self._follower.ask()
        self._next_beat = asyncio.get_running_loop().call_later(settings.heartbeat_interval, self._beat)

    def _data_connection_lost(self) -> None:
        # What the engine has still said is good, and need not be computed again elsewhere.
        self.client.drain()
        most = self._settings.max_message_bytes // 2**20
        self.client.mark_dead_after_grace(
            "the data connection to its server broke, "
            f"perhaps over an output of more than {most} MiB (--omni-max-message-size of this head)"
        )

    def _lose(self, reason: str, engine_failed: bool = False) -> None:
        if self._link is not None:
            self.client.drain()
            self.client.mark_dead(reason, engine_failed)
        else:
            self._end(reason)

    def _end(self, reason: str) -> None:
        if self.lost.done():
            return
        self._follower = None
        self.lost.set_result(reason)
        if not self._answer.done():
            self._answer.set_exception(ReplicaError(reason))
        self.on_lost(reason)


async def attach_remote(
    info: ReplicaInfo, replica_id: int, settings: AttachSettings, on_outputs: OnOutputs, on_status: OnStatus
) -> RemoteReplica:
    """Attach to a replica; returns when its engine has answered.

    Args:
        info: as the coordinator published it.
        replica_id: its id in this head.
        settings: of this head.
        on_outputs: see `StageClient`; the times in them are in our clock.
        on_status: called with UP or DRAINING when the server says so.

    Raises:
        AttachRefusedError: the server said no.
        ReplicaError: it cannot be reached, did not answer in time, refused the handshake, or was lost meanwhile.
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
"""What `attach_remote` is."""


def _nothing(reason: str) -> None:
    """Before anybody wants to know of a loss, and afterwards."""
