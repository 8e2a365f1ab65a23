"""What is counted and logged of refused connections."""

import struct
from typing import Any

import zmq

from vllm_omni_plugin.curve.descriptors import PendingConnections
from vllm_omni_plugin.curve.handshake_monitor import HandshakeMonitor, RefusalLog


class Monitor:
    """What a server socket's monitor says, event by event."""

    def __init__(self, events: list[tuple[int, int]]) -> None:
        self._events = iter(events)

    def recv_multipart(self) -> tuple[bytes, bytes]:
        return struct.pack("=Hi", *next(self._events)), b"tcp://127.0.0.1:1"


def test_a_refused_connection_counts_once_even_if_another_one_ends_first() -> None:
    refusals = RefusalLog(lambda: 0.0)
    events = [
        (zmq.EVENT_ACCEPTED, -2),
        (zmq.EVENT_HANDSHAKE_FAILED_AUTH, 400),  # which the ZAP handler has recorded
        (zmq.EVENT_ACCEPTED, -3),
        (zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL, 0),
        (zmq.EVENT_DISCONNECTED, -3),
        (zmq.EVENT_DISCONNECTED, -2),
        (zmq.EVENT_ACCEPTED, -4),
        (zmq.EVENT_DISCONNECTED, -4),
    ]
    reader: Any = Monitor(events)
    monitor = HandshakeMonitor(reader, "test", refusals, PendingConnections(), zmq.NULL, None)
    counts = []
    for _ in events:
        monitor.read_event()
        counts.append(refusals.count)
    assert counts == [0, 0, 0, 0, 1, 1, 1, 2]
