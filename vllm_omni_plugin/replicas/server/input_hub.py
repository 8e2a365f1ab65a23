"""The one way into an engine: what heads and the server itself send to it, in one stream."""

import threading

import zmq

from vllm_omni_plugin.replicas.links.forwarding import QUEUE_MESSAGES, forward, forwarding_context
from vllm_omni_plugin.replicas.links.link import remove_ipc_files


class InputHub:
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
