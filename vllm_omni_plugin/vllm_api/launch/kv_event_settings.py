"""Making engines report what their prefix caches hold."""

from typing import Any

from vllm.config import KVEventsConfig
from vllm.utils.network_utils import get_open_zmq_ipc_path

from vllm_omni_plugin.vllm_api.launch.spawning import remove_ipc_files

_IPC = "ipc://"
# vLLM changes an address by the engine's rank and refuses one that it cannot change. It takes this for a TCP address
# with a port of the system's choice, which it leaves alone; it is the name of a file all the same.
_LEFT_ALONE = "-tcp:0"


def why_no_cache_events(vllm_config: Any) -> str:
    """Why an engine of this configuration cannot report what its prefix cache holds, or ""."""
    if not vllm_config.cache_config.enable_prefix_caching:
        return "prefix caching is off, by the user or because the model does not support it"
    events = vllm_config.kv_events_config
    if events is not None and not events.enable_kv_cache_events:
        return "--kv-events-config turns them off"
    return ""


def turn_on_cache_events(vllm_config: Any) -> None:
    """Let the engine of this configuration report what its prefix cache holds, at addresses of its own on this machine.

    Nothing is changed where it cannot, or where the user has configured a publisher.
    """
    if vllm_config.kv_events_config is None and not why_no_cache_events(vllm_config):
        vllm_config.kv_events_config = KVEventsConfig(
            enable_kv_cache_events=True, publisher="zmq", endpoint=_new_address(), replay_endpoint=_new_address()
        )


def remove_event_sockets(vllm_config: Any) -> None:
    """Delete what an engine that has ended leaves of the addresses of `turn_on_cache_events`."""
    events = vllm_config.kv_events_config
    for address in () if events is None else (events.endpoint, events.replay_endpoint):
        if address is not None and address.startswith(_IPC) and address.endswith(_LEFT_ALONE):
            remove_ipc_files(address)


def _new_address() -> str:
    return f"{get_open_zmq_ipc_path()}{_LEFT_ALONE}"
