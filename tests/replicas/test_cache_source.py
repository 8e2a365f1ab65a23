"""Where an engine reports what it has cached, from its own words."""

from typing import Any

import msgspec
import pytest
import zmq

from vllm_omni_plugin.replicas.kv_events.cache_listener import listen_to_cache
from vllm_omni_plugin.replicas.kv_events.engine_events import CacheSource, find_cache_source, publishes_cache_events


def ready(**publisher: Any) -> bytes:
    return msgspec.msgpack.encode({"num_gpu_blocks": 9, "kv_events_config": publisher or None, "dtype": "float32"})


@pytest.mark.parametrize(
    ("said", "found"),
    [
        pytest.param(
            {"endpoint": "ipc:///run/a", "replay_endpoint": "ipc:///run/b", "publisher": "zmq"},
            CacheSource("ipc:///run/a", "ipc:///run/b", "", 9),
            id="ours",
        ),
        pytest.param(
            {"endpoint": "tcp://*:5557", "replay_endpoint": None, "topic": "kv"},
            CacheSource("tcp://127.0.0.1:5557", None, "kv", 9),
            id="the user's, without replay",
        ),
        pytest.param(
            {"endpoint": "tcp://[::]:5557", "replay_endpoint": "tcp://127.0.0.1:5558"},
            CacheSource("tcp://[::1]:5557", "tcp://127.0.0.1:5558", "", 9),
            id="the user's, on every address",
        ),
    ],
)
def test_a_local_publisher_is_found(said: dict[str, Any], found: CacheSource) -> None:
    assert publishes_cache_events(ready(**said))
    assert find_cache_source(ready(**said)) == found


@pytest.mark.parametrize("response", [ready(), b"", b'"ready"', msgspec.msgpack.encode([1])])
def test_an_engine_without_a_publisher_is_ignored(response: bytes, caplog: pytest.LogCaptureFixture) -> None:
    assert not publishes_cache_events(response)
    assert listen_to_cache(response, lambda _: None, "replica 0") is None
    assert caplog.records == []
    assert find_cache_source(response) is None


@pytest.mark.parametrize("endpoint", ["tcp://collector:5557", "inproc://events", "ipx://nonsense", "tcp://*:nonsense"])
async def test_an_unusable_publisher_is_logged_with_its_address(
    endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    response = ready(endpoint=endpoint)
    assert publishes_cache_events(response)
    assert listen_to_cache(response, lambda _: None, "replica 0") is None
    (record,) = caplog.records
    assert "replica 0" in record.getMessage()
    assert endpoint.replace("*", "127.0.0.1") in record.getMessage()


async def test_a_listener_without_a_socket_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with zmq.Context() as context:
        context.max_sockets = 1
        monkeypatch.setattr(zmq.Context, "instance", lambda: context)
        with context.socket(zmq.SUB):
            assert listen_to_cache(ready(endpoint="tcp://*:5557"), lambda _: None, "replica 0") is None
    assert "Too many open files" in caplog.text
