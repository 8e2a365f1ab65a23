"""Listening to what one engine of this machine reports about its prefix cache."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import zmq

from vllm_omni_plugin.balancing.base import CacheChange
from vllm_omni_plugin.errors import ReplicaError, WireError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.block_names import BlockNames
from vllm_omni_plugin.replicas.cache_events import decode_events
from vllm_omni_plugin.replicas.cache_source import CacheSource, find_cache_source, publishes_cache_events
from vllm_omni_plugin.replicas.link import SocketReader
from vllm_omni_plugin.replicas.report_sequence import MAX_WAITING, ReportSequence, Step

logger = init_logger(__name__)

CHECK_INTERVAL_S = 1.0
"""A batch that was the last for now and got lost is noticed after this time."""
_CHECKS_PER_ANSWER = 5
_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_NUMBER_BYTES = 8
_END_OF_REPLAY = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)

OnCacheChange = Callable[[CacheChange], None]
"""Told of every change in the cache of one engine. The first one, and the first after reports were lost, restarts."""


class CacheTap:
    """Follows one publisher of vLLM's KV cache events. Lives on the running event loop.

    Args:
        source: the publisher.
        on_change: see `OnCacheChange`.
        name: of the replica, for the log.
        check_interval: seconds between looks for what was lost unnoticed.
    """

    _asker: "zmq.Socket[bytes]"

    def __init__(
        self, source: CacheSource, on_change: OnCacheChange, name: str, check_interval: float = CHECK_INTERVAL_S
    ) -> None:
        self._source = source
        self._on_change = on_change
        self._name = name
        self._check_interval = check_interval
        self._names = BlockNames()
        self._sequence = ReportSequence(can_ask=source.replay_endpoint is not None)
        self._begun = False
        self._complete = True
        self._heard = False
        self._unanswered_checks = 0
        self._warned: set[str] = set()
        self._sockets: list[tuple[zmq.Socket[bytes], SocketReader]] = []
        self._next_check: asyncio.TimerHandle | None = None
        try:
            subscriber = self._connect(zmq.SUB, source.endpoint, self._on_published)
            subscriber.setsockopt_string(zmq.SUBSCRIBE, source.topic)
            if source.replay_endpoint is not None:
                self._asker = self._connect(zmq.DEALER, source.replay_endpoint, self._on_replayed)
                self._do(self._sequence.ask())
                self._check_later()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._next_check is not None:
            self._next_check.cancel()
        for socket, reader in self._sockets:
            reader.pause()
            socket.close(linger=0)
        self._sockets.clear()

    def _connect(self, kind: int, address: str, on_message: Callable[[list[Any]], None]) -> "zmq.Socket[bytes]":
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(kind)
        reader = SocketReader(socket, on_message)
        self._sockets.append((socket, reader))
        socket.maxmsgsize = _MAX_MESSAGE_BYTES
        socket.rcvhwm = MAX_WAITING
        socket.ipv6 = "[" in address
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            raise ReplicaError(f"{address!r} cannot be connected to: {error}") from error
        reader.resume()
        return socket

    def _on_published(self, frames: list[Any]) -> None:
        self._heard = True
        match frames:
            case [_, number, payload] if len(number) == _NUMBER_BYTES:
                self._do(self._sequence.published(_number(number), bytes(payload)))
            case _:
                self._warn("malformed message", "the engine sent a malformed message, which is ignored")

    def _on_replayed(self, frames: list[Any]) -> None:
        self._unanswered_checks = 0
        match frames:
            case [_, _, number, _] if bytes(number) == _END_OF_REPLAY:
                self._do(self._sequence.replay_ended())
                if not self._begun:
                    self._tell(CacheChange())
            case [_, _, number, payload] if len(number) == _NUMBER_BYTES:
                self._do(self._sequence.replayed(_number(number), bytes(payload)))
            case _:
                self._warn("malformed message", "the engine sent a malformed message, which is ignored")

    def _do(self, step: Step) -> None:
        if step.lost:
            self._lose("some were lost")
        for payload in step.batches:
            self._apply(payload)
        if step.ask:
            self._ask(self._sequence.expected)

    def _ask(self, number: int) -> None:
        # Full only when nobody has taken what was asked before.
        with suppress(zmq.Again):
            self._asker.send_multipart((b"", number.to_bytes(_NUMBER_BYTES, "big")), zmq.NOBLOCK)
        for _, reader in self._sockets:
            reader.look_again()

    def _apply(self, payload: bytes) -> None:
        try:
            change = self._names.apply(decode_events(payload, self._skipped))
        except WireError as error:
            self._lose("one was malformed", f": {error}")
            return
        # Models with several kinds of attention may name a part of a block, too.
        if 0 < 2 * self._source.blocks < self._names.copies:
            self._lose("they named more blocks than the engine has")
            return
        was_complete = self._complete
        # With as many known as there are, but for one that vLLM never uses, nothing unknown is left.
        self._complete |= change.restart or 0 < self._source.blocks - 1 <= self._names.copies
        if change.stored or change.removed or change.restart or self._complete is not was_complete:
            self._tell(change._replace(complete=self._complete))

    def _skipped(self, reason: str) -> None:
        self._warn("skipped", f"one cannot be read and is skipped: {reason}")

    def _lose(self, what: str, detail: str = "") -> None:
        self._warn(
            what, f"{what}{detail}; until its cache is cleared, its content is estimated from what was sent to it"
        )
        self._names.clear()
        self._complete = False
        self._tell(CacheChange(restart=True, complete=False))

    def _tell(self, change: CacheChange) -> None:
        if not self._begun:
            self._begun = True
            change = change._replace(restart=True)
        self._on_change(change)

    def _check_later(self) -> None:
        self._next_check = asyncio.get_running_loop().call_later(self._check_interval, self._check)

    def _check(self) -> None:
        if self._sequence.asked:
            self._unanswered_checks += 1
        if self._unanswered_checks >= _CHECKS_PER_ANSWER:
            self._unanswered_checks = 0
            self._warn("no answer", f"nobody answers at {self._source.replay_endpoint}")
            self._do(self._sequence.replay_ended())
        if not self._sequence.asked and not self._heard:
            self._do(self._sequence.ask())
        self._heard = False
        self._check_later()

    def _warn(self, kind: str, text: str) -> None:
        """Say what goes wrong; what follows of the same kind is for those who look for it."""
        log = logger.debug if kind in self._warned else logger.warning
        self._warned.add(kind)
        log("KV cache events of %s: %s.", self._name, text)


def open_cache_tap(ready_response: bytes, on_change: OnCacheChange, name: str) -> CacheTap | None:
    """A tap on an engine of this machine, or None if it reports nothing, or to where it cannot be listened to."""
    if not publishes_cache_events(ready_response):
        return None
    try:
        return CacheTap(find_cache_source(ready_response), on_change, name)
    except ReplicaError as error:
        logger.warning("KV cache events of %s cannot be followed: %s.", name, error)
        return None


def _number(frame: Any) -> int:
    return int.from_bytes(bytes(frame), "big")
