"""Makes engines publish KV cache events."""

from typing import Any

from vllm.config import KVEventsConfig
from vllm.utils.network_utils import get_open_zmq_ipc_path

from vllm_omni_plugin.vllm_api.launch.spawning import remove_ipc_files

_IPC = "ipc://"
# vLLM adds the engine's rank to an address and refuses an address where it cannot. This suffix looks to vLLM like a TCP
# address with a port that the system chooses, which vLLM does not change; it is only the end of a file name.
_UNCHANGED_SUFFIX = "-tcp:0"


def why_no_cache_events(vllm_config: Any) -> str:
    """Why an engine of this configuration cannot publish KV cache events, or ""."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off, by the user or because the model does not support it"
    events = vllm_config.kv_events_config
    if events is not None and not events.enable_kv_cache_events:
        return "--kv-events-config turns them off"
    return ""


def turn_on_cache_events(vllm_config: Any) -> None:
    """Make the engine publish KV cache events on ipc addresses, if it can and the user has set no publisher."""
    if vllm_config.kv_events_config is None and not why_no_cache_events(vllm_config):
        vllm_config.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=_new_address(), replay_endpoint=_new_address()
        )


def remove_event_sockets(vllm_config: Any) -> None:
    """Delete the socket files that an exited engine leaves after `turn_on_cache_events`."""
    events = vllm_config.kv_events_config
    for address in () if events is None else (events.endpoint, events.replay_endpoint):
        if address is not None and address.startswith(_IPC) and address.endswith(_UNCHANGED_SUFFIX):
            remove_ipc_files(address)


def _new_address() -> str:
    return f"{get_open_zmq_ipc_path()}{_UNCHANGED_SUFFIX}"
