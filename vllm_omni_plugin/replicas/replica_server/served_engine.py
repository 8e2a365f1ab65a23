"""An engine that several heads share through a replica server: one input for all heads, one output for each."""

import threading
from concurrent.futures import Executor
from contextlib import ExitStack

import zmq

from vllm_omni_plugin.replicas.engine.engine_start import Launcher, Process, start_engine
from vllm_omni_plugin.replicas.engine.running_engine import Engine
from vllm_omni_plugin.replicas.engine.socket_folder import new_ipc_address
from vllm_omni_plugin.replicas.kv_events.cache_log import CacheLog
from vllm_omni_plugin.replicas.links.engine_client import Codec
from vllm_omni_plugin.replicas.links.forwarding import QUEUE_MESSAGES, forward, forwarding_context
from vllm_omni_plugin.replicas.replica_server.output_slot import OutputSlot, SlotLink
from vllm_omni_plugin.vllm_api.launch.spawning import remove_ipc_files

HEAD_SLOTS = 32
"""Heads that may attach to one replica at the same time, such as two with 16 API server processes each. The number of
outputs of an engine is fixed at its start. An unused output costs this process three descriptors and 50 KB."""


class InputForwarder:
    """Passes messages from any number of PUSH sockets (at `local_addr`) to the engine's DEALER (at `engine_addr`).

    Only one thread may use the engine's ROUTER socket, so all writers send through this forwarder. Before `start`, the
    ROUTER may be read for the engine's ready response.
    """

    def __init__(self, engine_addr: str, local_addr: str) -> None:
        self.engine_addr = engine_addr
        self.local_addr = local_addr
        self._context = forwarding_context()
        self._thread: threading.Thread | None = None
        try:
            self.router = self._context.socket(zmq.ROUTER)
            # Unbounded as in vLLM, since a full ROUTER drops messages. Heads stop sending once the engine hangs.
            self.router.sndhwm = 0
            self.router.bind(engine_addr)
            self._pull = self._context.socket(zmq.PULL)
            self._pull.rcvhwm = QUEUE_MESSAGES
            self._pull.bind(local_addr)
        except BaseException:
            self._context.destroy(linger=0)
            raise

    def start(self) -> None:
        """Begin to pass messages on, including those that were sent before."""
        self._thread = forward("omni-engine-input", self._pull, self.router, (self._pull, self.router))

    def close(self) -> None:
        """End the thread and drop queued messages. Idempotent. No other thread may be reading `router`."""
        if self._thread is None:
            self._context.destroy(linger=0)
        else:
            self._context.term()
            self._thread.join()
        remove_ipc_files(self.engine_addr, self.local_addr)


class ServedEngine(Engine):
    """Made by `start_served_engine`. Its `client` belongs to the server and uses an output that is never leased.

    `links` are the links to the outputs; the last one is for the server. `slots` are the outputs for heads, by client
    index. `cache_log` stays empty if the engine does not report changes of its prefix cache.
    """

    def __init__(
        self,
        sockets: ExitStack,
        links: list[SlotLink],
        codec: Codec,
        *,
        name: str,
        identity: bytes,
        process: Process,
        ready_response: bytes,
    ) -> None:
        *head_links, own_link = links
        # The server sends no requests on its own output, so only statistics can arrive there.
        super().__init__(
            process,
            ready_response,
            own_link,
            codec=codec,
            name=name,
            on_outputs=lambda outputs: None,
            client_index=len(head_links),
        )
        self.identity = identity
        self.cache_log = CacheLog()
        self.subscribe_cache(self.cache_log.append)
        self._resources.push(sockets)
        self.slots = [OutputSlot(link, codec, name, index, self.mark_lost) for index, link in enumerate(head_links)]
        for slot in self.slots:
            self._resources.callback(slot.close)

    @property
    def is_busy(self) -> bool:
        return super().is_busy or any(slot.is_busy for slot in self.slots)

    async def close(self, executor: Executor, timeout: float | None = None) -> None:
        for slot in self.slots:
            slot.release()
        await super().close(executor, timeout)


async def start_served_engine(launcher: Launcher, codec: Codec, executor: Executor, replica_id: int) -> ServedEngine:
    """Start an engine with an output for each slot and one for the server. Arguments and errors as `start_engine`."""
    identity = launcher.identity(replica_id)
    with ExitStack() as sockets:
        forwarder = InputForwarder(new_ipc_address(), new_ipc_address())
        sockets.callback(forwarder.close)
        to_forwarder: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        # Unbounded, because these sends must not block. Messages are small, and the forwarder always reads.
        to_forwarder.sndhwm = 0
        sockets.callback(to_forwarder.close, linger=0)
        to_forwarder.connect(forwarder.local_addr)
        links: list[SlotLink] = []
        for _ in range(HEAD_SLOTS + 1):
            links.append(SlotLink(to_forwarder, new_ipc_address(), identity))
            sockets.callback(links[-1].close)
        output_addrs = [link.output_addr for link in links]
        process, ready_response = await start_engine(
            launcher, executor, replica_id, forwarder.engine_addr, output_addrs, router=forwarder.router
        )
        forwarder.start()
        return ServedEngine(
            sockets.pop_all(),
            links,
            codec,
            name=str(replica_id),
            identity=identity,
            process=process,
            ready_response=ready_response,
        )
