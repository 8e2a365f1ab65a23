"""vLLM puts its sockets where this package says."""

import pytest
from vllm.utils.network_utils import get_open_zmq_ipc_path

from vllm_omni_plugin.replicas.engine.socket_folder import new_ipc_address


def test_addresses_of_vllm_and_ours_follow_a_change_of_the_base_path(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("/tmp/one", "/tmp/two"):
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", folder)
        assert get_open_zmq_ipc_path().startswith(f"ipc://{folder}/")
        assert new_ipc_address().startswith(f"ipc://{folder}/")
