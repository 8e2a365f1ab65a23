"""Subscribes to the KV cache events of one engine of this machine."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq

from vllm_omni_plugin.balancing import CacheChange
from vllm_omni_plugin.errors import ReplicaError, WireError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.kv_events.cached_blocks import CachedBlocks
from vllm_omni_plugin.replicas.kv_events.engine_events import CacheSource, decode_events, find_cache_source
from vllm_omni_plugin.replicas.links.link import SocketReader

logger = init_logger(__name__)

_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_UNREAD = 10_000
_NUMBER_BYTES = 8
MOST_MISSED = 1000
"""Largest gap, in batches, for which a replay is requested after the start; a larger gap counts as lost."""
_END_OF_REPLAY = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)

OnCacheChange = Callable[[CacheChange], None]
"""Called with every change of one engine's cache. The first change is a restart. A change that is not `complete` means
that reports were lost; the next change after it is a restart."""


class CacheListener:
    """Reads one publisher of vLLM's KV cache events. Lives on the running event loop.

    A publisher numbers its batches from 0 at the start of its engine, and a connection keeps their order. Batches may
    be missing from before the subscription, or because they were not read in time. The publisher keeps its last
    batches: at a gap the listener requests a replay from there on, and ignores other batches until the replay arrives.
    """

    def __init__(self, source: CacheSource, on_change: OnCacheChange, name: str) -> None:
        self._source = source
        self._on_change = on_change
        self._name = name
        self._blocks = CachedBlocks()
        self._expected = 0
        self._replaying = False
        self._started = False
        self._complete = True
        self._warned: set[str] = set()
        self._sockets: list[tuple[zmq.Socket[bytes], SocketReader]] = []
        self._replay_socket: zmq.Socket[bytes] | None = None
        try:
            subscriber = self._connect(zmq.SUB, source.endpoint, self._on_published)
            subscriber.setsockopt_string(zmq.SUBSCRIBE, source.topic)
            if source.replay_endpoint is not None:
                self._replay_socket = self._connect(zmq.DEALER, source.replay_endpoint, self._on_replayed)
                self._request_replay(self._replay_socket)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        for socket, reader in self._sockets:
            reader.pause()
            socket.close(linger=0)
        self._sockets.clear()

    def _connect(self, kind: int, address: str, on_message: Callable[[list[Any]], None]) -> "zmq.Socket[bytes]":
        try:
            socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
            reader = SocketReader(socket, on_message)
            self._sockets.append((socket, reader))
            socket.maxmsgsize = _MAX_MESSAGE_BYTES
            socket.rcvhwm = MAX_UNREAD
            socket.ipv6 = "[" in address
            socket.connect(address)
            reader.resume()
        except (zmq.ZMQError, OSError) as error:  # no descriptor is left, or the address is invalid
            raise ReplicaError(f"{address!r} cannot be connected to: {error}") from error
        return socket

    def _on_published(self, frames: list[Any]) -> None:
        match frames:
            case [_, number, payload] if len(number) == _NUMBER_BYTES:
                missed = int.from_bytes(bytes(number), "big") - self._expected
                if self._replay_socket is not None and missed > 0 and (missed <= MOST_MISSED or not self._started):
                    self._request_replay(self._replay_socket)
                else:
                    self._handle(missed, bytes(payload))
            case _:
                self._warn("malformed message", "the engine sent a malformed message, which is ignored")

    def _on_replayed(self, frames: list[Any]) -> None:
        match frames:
            case [_, _, number, _] if bytes(number) == _END_OF_REPLAY:
                self._replaying = False
                if not self._started:
                    self._notify(CacheChange())
            case [_, _, number, payload] if len(number) == _NUMBER_BYTES:
                self._handle(int.from_bytes(bytes(number), "big") - self._expected, bytes(payload))
            case _:
                self._warn("malformed message", "the engine sent a malformed message, which is ignored")

    def _request_replay(self, publisher: "zmq.Socket[bytes]") -> None:
        if self._replaying:
            return
        self._replaying = True
        # Full only if earlier requests were not read.
        with suppress(zmq.Again):
            publisher.send_multipart((b"", self._expected.to_bytes(_NUMBER_BYTES, "big")), zmq.NOBLOCK)
        for _, reader in self._sockets:
            reader.look_again()

    def _handle(self, missed: int, payload: bytes) -> None:
        """Handle a batch. `missed`: batches lost before it; negative for a batch that was handled before."""
        if missed < 0:
            return
        if missed:
            self._report_loss("some were lost")
        self._expected += missed + 1
        self._apply(payload)

    def _apply(self, payload: bytes) -> None:
        """Apply reported changes; malformed or impossible ones end the trust in these reports."""
        try:
            change = self._blocks.apply(decode_events(payload, self._skipped))
        except WireError as error:
            self._report_loss("one was malformed", f": {error}")
            return
        # Factor 2: models with several kinds of attention may also report parts of a block.
        if 0 < 2 * self._source.blocks < self._blocks.copies:
            self._report_loss("they named more blocks than the engine has")
            return
        self._complete |= change.restart
        if self._complete and (change.stored or change.removed or change.restart):
            self._notify(change)

    def _skipped(self, reason: str) -> None:
        self._warn("skipped", f"one cannot be read and is skipped: {reason}")

    def _report_loss(self, what: str, detail: str = "") -> None:
        """Estimate this engine's cache until it is cleared, since its reports have a gap."""
        self._warn(
            what, f"{what}{detail}; until its cache is cleared, its content is estimated from what is sent to it"
        )
        self._blocks.clear()
        if self._complete:
            self._complete = False
            self._notify(CacheChange(restart=True, complete=False))

    def _notify(self, change: CacheChange) -> None:
        if not self._started:
            self._started = True
            change = change._replace(restart=True)
        self._on_change(change)

    def _warn(self, kind: str, text: str) -> None:
        """Log a warning; further ones of the same kind are logged at debug level."""
        log = logger.debug if kind in self._warned else logger.warning
        self._warned.add(kind)
        log("KV cache events of %s: %s.", self._name, text)


def listen_to_cache(ready_response: bytes, on_change: OnCacheChange, name: str) -> CacheListener | None:
    """A listener for an engine of this machine; None if it publishes no events, or at an unusable address."""
    try:
        source = find_cache_source(ready_response)
        return CacheListener(source, on_change, name) if source else None
    except ReplicaError as error:
        logger.warning("KV cache events of %s cannot be received: %s.", name, error)
        return None
