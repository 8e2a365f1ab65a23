"""One output of an engine: read by a proxy while a head holds its lease, otherwise by the server."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import zmq

from vllm_omni_plugin.replicas.links.engine_client import Codec, EngineClient
from vllm_omni_plugin.replicas.links.forwarding import QUEUE_MESSAGES, Socket
from vllm_omni_plugin.replicas.links.link import Link
from vllm_omni_plugin.replicas.replica_server.data_proxy import DataProxy
from vllm_omni_plugin.vllm_api.launch.spawning import remove_ipc_files


class SlotLink(Link):
    """The server's own link to its engine, out of one slot.

    `to_forwarder` is a PUSH connected to the engine's `InputForwarder`. All links of one engine share it; they do not
    close it.
    """

    def __init__(self, to_forwarder: Socket, output_addr: str, identity: bytes) -> None:
        self.input_addr = to_forwarder.get_string(zmq.LAST_ENDPOINT)
        self.output_addr = output_addr
        self.input_socket = to_forwarder
        self.identity = identity
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        self.output_socket = context.socket(zmq.PULL)
        self.output_socket.rcvhwm = QUEUE_MESSAGES
        try:
            self.output_socket.bind(output_addr)
        except BaseException:
            self.output_socket.close(linger=0)
            raise

    def close(self) -> None:
        self._stop_reading()
        self.output_socket.close(linger=0)
        remove_ipc_files(self.output_addr)


class OutputSlot:
    """One output of an engine that heads may lease. Lives on the loop that made it.

    While it is not leased, the server reads and drops its outputs and aborts their requests: requests of a lost head
    must not keep the engine busy, and unread outputs would pile up in the engine.

    `on_dead` is called when the engine reports its death on this slot, with the reason and whether it crashed.

    `is_busy` is set to whether the head has said that it has a call open which may block the engine for long.
    `ended` exists after the first lease: done once the ports of the last lease are free.
    """

    def __init__(
        self, link: SlotLink, codec: Codec, name: str, index: int, on_dead: Callable[[str, bool], None]
    ) -> None:
        self.client = EngineClient(
            link,
            codec,
            name,
            self._abort_orphans,
            lambda reason: on_dead(reason, self.client.engine_failed),
            client_index=index,
        )
        self._link = link
        self._proxy: DataProxy | None = None
        self.is_busy = False
        self.ended: asyncio.Future[None]
        self.client.start()

    def lease(self, new_proxy: Callable[..., DataProxy]) -> DataProxy:
        """Give the slot to a head; `new_proxy` makes a `DataProxy`, from the arguments that it takes by name.

        Raises FileNotFoundError if the socket for inputs was removed, so that the proxy could not connect to it.
        """
        os.stat(self._link.input_addr.removeprefix("ipc://"))
        self.client.pause_reading()
        # Outputs that have arrived belong to an earlier head.
        self.client.drain()
        try:
            self._proxy = new_proxy(forwarder_addr=self._link.input_addr, slot_socket=self._link.output_socket)
        except BaseException:
            self.client.resume_reading()
            raise
        return self._proxy

    def release(self) -> None:
        """End the proxy at once: its head can neither receive nor send any more. Idempotent."""
        proxy, self._proxy, self.is_busy = self._proxy, None, False
        if proxy is not None:
            proxy.close()
            self.ended = proxy.ended
            self.client.resume_reading()

    async def wait_until_clean(self) -> None:
        """Return when the engine has received all requests of the former head, and its outputs so far were read here.

        The engine handles its input in order, so the answer to a call proves both. Raises `ReplicaError` if the engine
        is dead.
        """
        await self.client.call("is_sleeping")

    def close(self) -> None:
        self.release()
        self.client.close()

    def _abort_orphans(self, outputs: Any) -> None:
        """Abort what still computes for a head that is gone."""
        orphans = [output.request_id for output in outputs.outputs if output.finish_reason is None]
        if orphans:
            self.client.abort_requests(orphans)
