"""The thread that passes messages from one socket to another."""

from typing import Any

import pytest
import zmq

from vllm_omni_plugin.replicas.links import forwarding


def test_a_false_readable_event_does_not_end_the_forwarding(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own_proxy, calls = zmq.proxy, []

    def proxy(source: Any, sink: Any) -> None:
        calls.append((source, sink))
        if len(calls) < 3:
            raise zmq.Again
        own_proxy(source, sink)

    monkeypatch.setattr(zmq, "proxy", proxy)
    context = forwarding.forwarding_context()
    outside: zmq.Context[Any] = zmq.Context()
    source, sink = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    source_port, sink_port = source.bind_to_random_port("tcp://127.0.0.1"), sink.bind_to_random_port("tcp://127.0.0.1")
    thread = forwarding.forward("forwarding", source, sink, (source, sink))
    try:
        writer, reader = outside.socket(zmq.PUSH), outside.socket(zmq.PULL)
        writer.connect(f"tcp://127.0.0.1:{source_port}")
        reader.connect(f"tcp://127.0.0.1:{sink_port}")
        writer.send_multipart([b"a", b"b"])
        assert reader.poll(5000)
        assert reader.recv_multipart() == [b"a", b"b"]
    finally:
        outside.destroy(linger=0)
        context.term()
        thread.join(5)
    assert (len(calls), thread.is_alive()) == (3, False)
