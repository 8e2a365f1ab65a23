"""A publisher of KV cache events: vLLM's protocol over real sockets, controlled by the test."""

from pathlib import Path
from typing import Any

import msgspec
import zmq

from vllm_omni_plugin.balancing import CacheChange
from vllm_omni_plugin.replicas.links.link import SocketReader

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)
BLOCK_SIZE = 4


class FakePublisher:
    """Publishes on ipc. Lives on the running event loop.

    Attributes:
        asked: start numbers of the replay requests, in order.
        answers: whether it answers replay requests.
    """

    def __init__(self, folder: Path, name: str = "events") -> None:
        self.endpoint, self.replay_endpoint = f"ipc://{folder}/{name}", f"ipc://{folder}/{name}-replay"
        self.asked: list[int] = []
        self.answers = True
        self._buffer: list[tuple[int, bytes]] = []
        self._next = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        # XPUB receives subscriptions.
        self._pub = self._context.socket(zmq.XPUB)
        self._subscribed = False
        self._pub.bind(self.endpoint)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(self.replay_endpoint)
        self._reader = SocketReader(self._router, self._answer)
        self._reader.resume()

    def ready_response(self, blocks: int = 1000, **other: Any) -> bytes:
        publisher = {"endpoint": self.endpoint, "replay_endpoint": self.replay_endpoint, "topic": ""}
        return msgspec.msgpack.encode(
            {"max_model_len": 100, "num_gpu_blocks": blocks, "kv_events_config": publisher | other}
        )

    @property
    def is_subscribed(self) -> bool:
        return self._has_subscriber(within_ms=0)

    def publish(self, *events: dict[str, Any]) -> None:
        self.publish_raw(msgspec.msgpack.encode([0.5, events, 0]))

    def publish_raw(self, payload: bytes) -> None:
        # A listener subscribes over another connection than its replay requests; earlier batches would be lost.
        assert not self.asked or self._has_subscriber(within_ms=30_000)
        self._pub.send_multipart((b"", self._next.to_bytes(8, "big"), payload))
        self.lose_raw(payload)

    def lose(self, *events: dict[str, Any]) -> None:
        """Add a batch that is not published, but can be replayed."""
        self.lose_raw(msgspec.msgpack.encode([0.5, events, 0]))

    def lose_raw(self, payload: bytes) -> None:
        self._buffer.append((self._next, payload))
        self._next += 1

    def send_frames(self, *frames: bytes) -> None:
        self._pub.send_multipart(frames)

    def forget(self) -> None:
        self._buffer.clear()

    def close(self) -> None:
        self._reader.pause()
        for socket in (self._pub, self._router):
            socket.close(linger=0)
        self._context.term()

    def _has_subscriber(self, within_ms: int) -> bool:
        if not self._subscribed and self._pub.poll(within_ms):
            self._subscribed = self._pub.recv() == b"\x01"
        return self._subscribed

    def _answer(self, frames: list[Any]) -> None:
        peer, _, start = map(bytes, frames)
        self.asked.append(int.from_bytes(start, "big"))
        if not self.answers:
            return
        for number, payload in self._buffer:
            if number >= self.asked[-1]:
                self._router.send_multipart((peer, b"", b"", number.to_bytes(8, "big"), payload))
        self._router.send_multipart((peer, b"", b"", END_OF_REPLAY, b""))
        self._reader.look_again()


def stored(tokens: list[int], *hashes: int, parent: int | None = None) -> dict[str, Any]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": tokens,
        "block_size": BLOCK_SIZE,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "group_idx": 0,
    }


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU", "group_idx": 0}


CLEARED = {"type": "AllBlocksCleared"}


class Mirror:
    """The cache content as a receiver of all changes knows it. `complete` is None before the first change."""

    def __init__(self) -> None:
        self.keys: set[int] = set()
        self.complete: bool | None = None
        self.restarts = 0

    def apply(self, change: CacheChange) -> None:
        if change.restart:
            self.restarts += 1
            self.keys.clear()
        self.keys.difference_update(change.removed)
        self.keys.update(change.stored)
        self.complete = change.complete
