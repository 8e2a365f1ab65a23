"""The coordinator's sockets are given back."""

import threading
from contextlib import suppress

import zmq

from vllm_omni_plugin.coordinator.protocol.coordinator_sockets import CoordinatorSockets


def test_close_returns_while_heads_that_read_nothing_disconnect() -> None:
    # Each round hung once in 15 while an endpoint lingered for ever.
    for _ in range(60):
        ports = CoordinatorSockets("tcp://127.0.0.1:0", "tcp://127.0.0.1:0", None)
        heads: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        heads.linger = 0
        peers = [heads.socket(zmq.DEALER) for _ in range(8)]
        for peer in peers:
            peer.rcvhwm = 1
            peer.rcvbuf = 5000
            peer.connect(ports.router_address)
            peer.send(b"")
        for _ in peers:
            identity, _ = ports.router.recv_multipart()
            with suppress(zmq.Again):
                for _ in range(300):
                    ports.router.send_multipart([identity, bytes(60000)], zmq.NOBLOCK)
        leaving = threading.Thread(target=heads.destroy)
        leaving.start()
        closing = threading.Thread(target=ports.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        leaving.join()
