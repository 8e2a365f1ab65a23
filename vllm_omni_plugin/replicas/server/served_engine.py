"""An engine behind a replica server, which several heads share: one input for all, an output for each."""

import threading
from concurrent.futures import Executor
from contextlib import ExitStack
from typing import Any

import zmq

from vllm_omni_plugin.replicas.client.stage_client import Codec
from vllm_omni_plugin.replicas.engine.engine_start import Launcher, Process, start_engine
from vllm_omni_plugin.replicas.engine.running_engine import Engine
from vllm_omni_plugin.replicas.engine.socket_folder import new_ipc_address
from vllm_omni_plugin.replicas.kv_events.cache_log import CacheLog
from vllm_omni_plugin.replicas.links.forwarding import QUEUE_MESSAGES, forward, forwarding_context
from vllm_omni_plugin.replicas.server.output_slot import OutputSlot, SlotLink
from vllm_omni_plugin.vllm_api.launch.spawning import remove_ipc_files

HEAD_SLOTS = 32
"""Heads that may hold one replica at the same time, such as two with 16 API server processes each. The engine learns
the number of its outputs when it starts. One that nobody holds costs this process three descriptors and 50 KB."""


class InputForwarder:
    """Passes messages from any number of PUSH sockets on this node to the engine's DEALER.

    A ROUTER socket may be used by one thread only, so whoever writes to the engine does it through the hub.

    Args:
        engine_addr: ipc address to bind for the engine.
        local_addr: ipc address to bind for those that write.

    Attributes:
        router: where the engine's ready response comes; to be read before `start` only.
    """

    def __init__(self, engine_addr: str, local_addr: str) -> None:
        self.engine_addr = engine_addr
        self.local_addr = local_addr
        self._context = forwarding_context()
        self._thread: threading.Thread | None = None
        try:
            self.router = self._context.socket(zmq.ROUTER)
            # Unbounded as vLLM's own: a ROUTER that is full drops messages. Heads stop writing to an engine that
            # takes nothing when it is found to hang.
            self.router.sndhwm = 0
            self.router.bind(engine_addr)
            self._pull = self._context.socket(zmq.PULL)
            self._pull.rcvhwm = QUEUE_MESSAGES
            self._pull.bind(local_addr)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def start(self) -> None:
        """Begin to pass messages on; what was sent before has waited."""
        self._thread = forward("omni-engine-input", self._pull, self.router, (self._pull, self.router))

    def close(self) -> None:
        """End the thread and drop what is queued. Idempotent; not while another thread reads `router`."""
        if self._thread is None:
            self._context.destroy(linger=0)
        else:
            self._context.term()
            self._thread.join()
        remove_ipc_files(self.engine_addr, self.local_addr)


class ServedEngine(Engine):
    """Made by `start_served_engine`. Its `client` is the server's own, on an output that heads do not get.

    Args:
        sockets: closed with the engine.
        links: the outputs, that of the server last.
        others: see `Engine`.

    Attributes:
        identity: the engine's ZMQ identity.
        slots: the outputs for heads, by client index.
        cache_log: what it has cached; stays empty if it does not report that.
    """

    def __init__(
        self,
        sockets: ExitStack,
        links: list[SlotLink],
        codec: Codec,
        name: str,
        identity: bytes,
        process: Process,
        ready_response: bytes,
    ) -> None:
        *head_links, own_link = links
        super().__init__(process, ready_response, own_link, codec, name, _ignore, len(head_links))
        self.identity = identity
        self.cache_log = CacheLog()
        self.subscribe_cache(self.cache_log.append)
        self._resources.push(sockets)
        self.slots = [OutputSlot(link, codec, name, index, self.mark_lost) for index, link in enumerate(head_links)]
        for slot in self.slots:
            self._resources.callback(slot.close)

    async def close(self, executor: Executor, timeout: float | None = None) -> None:
        """Cut the heads off, then end the engine."""
        for slot in self.slots:
            slot.release()
        await super().close(executor, timeout)


async def start_served_engine(launcher: Launcher, codec: Codec, executor: Executor, replica_id: int) -> ServedEngine:
    """Start an engine with an output for each slot and one for the server; returns when it is ready.

    Args:
        launcher: starts the process.
        codec: see `StageClient`.
        executor: where the blocking parts run: spawning, and waiting for the model to load.
        replica_id: index of the engine among those of this node.

    Raises:
        ReplicaError: the engine ended before it was ready.
    """
    identity = launcher.identity(replica_id)
    with ExitStack() as sockets:
        hub = InputForwarder(new_ipc_address(), new_ipc_address())
        sockets.callback(hub.close)
        to_hub: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        # Unbounded, because these sends may not wait; what is sent is small, and the hub always takes it.
        to_hub.sndhwm = 0
        sockets.callback(to_hub.close, linger=0)
        to_hub.connect(hub.local_addr)
        links: list[SlotLink] = []
        for _ in range(HEAD_SLOTS + 1):
            links.append(SlotLink(to_hub, new_ipc_address(), identity))
            sockets.callback(links[-1].close)
        output_addrs = [link.output_addr for link in links]
        process, ready_response = await start_engine(
            launcher, executor, replica_id, hub.engine_addr, output_addrs, hub.router
        )
        hub.start()
        return ServedEngine(sockets.pop_all(), links, codec, str(replica_id), identity, process, ready_response)


def _ignore(outputs: Any) -> None:
    """No request is ever sent with the server's own client index; statistics may come."""
