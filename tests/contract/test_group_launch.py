"""How `--data-parallel-size` changes a configuration, and how the engines of ranks are numbered."""

from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm.v1.engine import EngineCoreReadyResponse
from vllm.v1.engine.utils import CoreEngine

from tests.engine.experts import MIXTRAL
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.vllm_api.codecs.sim_protocol import ready_response
from vllm_omni_plugin.vllm_api.engine_messages.ready import apply_ready_responses
from vllm_omni_plugin.vllm_api.launch import engine_launch as launch
from vllm_omni_plugin.vllm_api.launch.group_launch import GroupLauncher, new_launcher, split_ranks
from vllm_omni_plugin.vllm_api.launch.spawning import NodeShare

from .configs import vllm_config, write_model
from .test_node_shares import platform

RANKS = 2


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    return write_model(tmp_path / "experts", **MIXTRAL)


def launcher_of(model: Path, **arguments: Any) -> Any:
    engine_config, _ = split_ranks(vllm_config(model, **arguments))
    return new_launcher(
        engine_config, object, True, NodeShare(0, 4), lambda _pid: None, report_cache=False, numbers=range(3, 7)
    )


def test_a_mixture_of_experts_has_all_ranks_in_the_engine_config_and_one_in_the_front_end(experts: Path) -> None:
    config = vllm_config(experts, data_parallel_size=RANKS)
    engine_config, ranks = split_ranks(config)
    parallel = engine_config.parallel_config
    assert ranks == RANKS
    assert (parallel.data_parallel_size, parallel.data_parallel_size_local) == (RANKS, RANKS)
    assert config.parallel_config.data_parallel_size == 1


def test_the_engines_of_every_group_are_numbered_from_0(experts: Path) -> None:
    launcher = launcher_of(experts, data_parallel_size=RANKS)
    assert isinstance(launcher, GroupLauncher)
    identities = [CoreEngine(index=rank).identity for rank in (0, 1, 0, 1)]
    assert [launcher.identity(replica) for replica in range(4)] == identities
    assert [list(launcher.group_of(replica)) for replica in range(4)] == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_later_group_uses_the_next_devices(experts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spawned: dict[int, Any] = {}

    def spawn(config: Any, _executor: Any, _stats: bool, *, engine: int, rank: int, **_: Any) -> None:
        assert engine == rank
        spawned[rank] = config
        raise ReplicaError("seen")

    monkeypatch.setattr(launch, "current_platform", platform("cuda"))
    monkeypatch.setattr(launch, "spawn_engine", spawn)
    launcher = launcher_of(experts, data_parallel_size=RANKS)
    starts = [launcher.start(replica) for replica in (2, 3)]
    together(starts, "seen")
    assert {config.parallel_config.assigned_physical_gpu_ids[rank] for rank, config in spawned.items()} == {102, 103}


def test_a_rank_that_is_cancelled_before_its_siblings_start_is_not_spawned(experts: Path) -> None:
    launcher = launcher_of(experts, data_parallel_size=RANKS)
    lonely = launcher.start(0)
    lonely.kill()
    with pytest.raises(ReplicaError, match="was cancelled"):
        lonely.wait("ipc:///nowhere", [])
    lonely.shutdown(0.0)


def test_ready_responses_of_several_groups_are_applied_although_each_names_a_coordinator(experts: Path) -> None:
    config = vllm_config(experts)
    own_port = config.parallel_config._coord_store_port
    responses = []
    for group in range(2):
        ready = msgspec.msgpack.decode(ready_response(config, 0, 10, 16))
        responses.append(msgspec.msgpack.encode(ready | addresses_of(group) | {"max_model_len": 100}))
    apply_ready_responses(config, responses)
    cache = config.cache_config
    assert (cache.num_gpu_blocks, cache.block_size, cache.kv_cache_size_tokens) == (20, 16, 160)
    assert config.model_config.max_model_len == 100
    assert config.parallel_config._coord_store_port == own_port


def addresses_of(group: int) -> dict[str, Any]:
    """A distinct value for every port and address in a ready response."""
    found: dict[str, Any] = {}
    for field in fields(EngineCoreReadyResponse):
        if field.name.endswith("_address"):
            found[field.name] = f"ipc:///{field.name}{group}"
        elif field.name.endswith("_port"):
            found[field.name] = 5000 + group
    return found


def together(starts: list[Any], error: str) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(len(starts)) as threads:
        waits = [threads.submit(start.wait, "ipc:///nowhere", []) for start in starts]
        for wait in waits:
            with pytest.raises(ReplicaError, match=error):
                wait.result(30)
