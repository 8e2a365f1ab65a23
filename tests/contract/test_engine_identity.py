"""What vLLM derives from an engine's index differs between the replicas of a fleet, and between their incarnations."""

import copy
import pickle
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.config import ECTransferConfig, KVTransferConfig, ParallelConfig, ProfilerConfig
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.utils import torch_utils
from vllm.v1.engine import core

from tests.engine.experts import MIXTRAL
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.integration.fleet_setup import fleet
from vllm_omni_plugin.integration.processes.headless import replica_servers
from vllm_omni_plugin.vllm_api.launch import engine_launch, machines_launch
from vllm_omni_plugin.vllm_api.launch.engine_identity import require_free_ports, set_identity
from vllm_omni_plugin.vllm_api.launch.group_launch import new_launcher, split_ranks
from vllm_omni_plugin.vllm_api.launch.spawning import NodeShare

from .configs import vllm_config, write_model

NIXL_HOST = "VLLM_NIXL_SIDE_CHANNEL_HOST"
MODELS = {"dense": {}, "experts": MIXTRAL}


class StartedError(Exception):
    """Raised in place of the start of an engine core."""


@pytest.fixture
def spawned(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The configurations with which vLLM made engine cores, in their own processes, so to speak."""
    spawned: list[Any] = []

    class Core:
        def __init__(self, *_: Any, vllm_config: Any, **__: Any) -> None:
            spawned.append(vllm_config)
            raise SystemExit

    class RankCore(Core):
        def __init__(self, *arguments: Any, vllm_config: Any, **more: Any) -> None:
            real_rank_core._init_data_parallel(SimpleNamespace(), vllm_config)
            super().__init__(*arguments, vllm_config=vllm_config, **more)

    def spawn(config: Any, _executor: Any, _stats: bool, *, engine: int, rank: int, **_: Any) -> None:
        with pytest.raises(SystemExit):
            run(vllm_config=pickle.loads(pickle.dumps(config)), dp_rank=engine, local_dp_rank=rank)
        raise StartedError

    run, real_rank_core = core.EngineCoreProc.run_engine_core, core.DPEngineCoreProc
    monkeypatch.setattr(core, "EngineCoreProc", Core)
    monkeypatch.setattr(core, "DPEngineCoreProc", RankCore)
    monkeypatch.setattr(ParallelConfig, "stateless_init_dp_group", lambda self, return_store=False: (None, None))
    for name in ("set_process_title", "decorate_logs", "maybe_init_worker_tracer"):
        monkeypatch.setattr(core, name, lambda *_: None)
    monkeypatch.setattr(core.signal, "signal", lambda *_: None)
    monkeypatch.setattr(engine_launch, "spawn_engine", spawn)
    return spawned


def launcher_of(folder: Path, kind: str, *numbers: int, first_incarnation: int = 0, **arguments: Any) -> Any:
    transfers = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both", engine_id="name")
    config = vllm_config(write_model(folder / kind, **MODELS[kind]), kv_transfer_config=transfers, **arguments)
    config, _ = split_ranks(config)
    return new_launcher(
        config,
        object,
        True,
        NodeShare(),
        lambda _: None,
        report_cache=False,
        numbers=numbers,
        first_incarnation=first_incarnation,
    )


def start(launcher: Any, replica: int) -> None:
    with pytest.raises(StartedError):
        launcher.start(replica)


@pytest.mark.parametrize("kind", MODELS)
def test_each_replica_has_its_number_as_index_and_no_lockstep_siblings(
    kind: str, tmp_path: Path, spawned: list[Any]
) -> None:
    launcher = launcher_of(tmp_path, kind, 0, 7, 30_000)
    for replica in range(3):
        start(launcher, replica)
    parallel = [config.parallel_config for config in spawned]
    assert [each.data_parallel_index for each in parallel] == [0, 7, 30_000]
    assert {(each.data_parallel_rank, each.data_parallel_size) for each in parallel} == {(0, 1)}
    assert {type(each) for each in parallel} == {ParallelConfig}
    ports = [nixl_port(config) for config in spawned]
    assert ports == [envs.VLLM_NIXL_SIDE_CHANNEL_PORT + number for number in (0, 7, 30_000)]


def nixl_port(config: Any) -> int:
    return int(nixl_scheduler(config).side_channel_port)


def nixl_scheduler(config: Any) -> Any:
    scheduler: Any = SimpleNamespace()
    with pytest.raises(AttributeError):
        # It reads more of a real configuration of a KV cache.
        NixlBaseConnectorScheduler.__init__(scheduler, config, "engine", None)
    return scheduler


@pytest.fixture
def own_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has given no host for NIXL; what is set meanwhile is removed."""
    monkeypatch.setenv(NIXL_HOST, "")
    monkeypatch.delenv(NIXL_HOST)


class PlannedError(Exception):
    """Raised in place of planning stages."""


@pytest.mark.usefixtures("own_host")
@pytest.mark.parametrize(
    ("side", "given", "expected"),
    [
        pytest.param("head", "", "127.0.0.7", id="head"),
        pytest.param("node", "", "127.0.0.7", id="node"),
        pytest.param("head", "10.9.9.9", "10.9.9.9", id="the user's on a head"),
        pytest.param("node", "10.9.9.9", "10.9.9.9", id="the user's on a node"),
        pytest.param("closed", "", "localhost", id="a fleet that nobody can join"),
    ],
)
def test_engines_announce_nixl_at_the_address_of_their_replicas_unless_the_user_gave_one(
    side: str, given: str, expected: str, tmp_path: Path, spawned: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(*_: Any) -> None:
        raise PlannedError

    if given:
        monkeypatch.setenv(NIXL_HOST, given)
    for name in ("forbid_fork", "use_socket_folder"):
        monkeypatch.setattr(fleet, name, lambda: None)
    monkeypatch.setattr(fleet, "stage_plans", plan)
    options = OmniConfig(master_address="127.0.0.7", master_port=7500, insecure=True)
    if side == "node":
        watch: Any = None
        servers = replica_servers(
            [], [], options, address="127.0.0.7", coordinator="tcp://127.0.0.7:7500", on_spawn=watch, executor=watch
        )
        assert servers == []
    else:
        with pytest.raises(PlannedError):
            fleet.Fleet(options if side == "head" else OmniConfig(), None, None, True)
    start(launcher_of(tmp_path, "dense", 3), 0)
    assert nixl_scheduler(spawned[0]).side_channel_host == expected


def test_ports_of_ipv6_hosts_are_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    transfers = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    config = SimpleNamespace(kv_transfer_config=transfers)
    monkeypatch.setenv(NIXL_HOST, "::1")
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(taken.getsockname()[1]))
        with pytest.raises(ReplicaError, match="Address already in use"):
            require_free_ports(config, 0)
    require_free_ports(config, 0)


@pytest.mark.parametrize("connector", ["NixlConnector", "MultiConnector", "ExampleConnector"])
def test_an_engine_whose_nixl_port_is_taken_does_not_start(
    connector: str, tmp_path: Path, spawned: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    extra = {"connectors": [{"kv_connector": "NixlConnector", "kv_role": "kv_both"}]}
    launcher = launcher_of(tmp_path, "experts", 3, 4)
    transfers = launcher.vllm_config.kv_transfer_config
    transfers.kv_connector = connector
    transfers.kv_connector_extra_config = extra if connector == "MultiConnector" else {}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", "127.0.0.1")
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port - 3))
        if connector == "ExampleConnector":
            start(launcher, 0)
        else:
            with pytest.raises(ReplicaError, match=rf"port {port}, .*number 3 .*Address already in use"):
                launcher.start(0)
    start(launcher, 0)
    assert all(config.parallel_config.data_parallel_index == 3 for config in spawned)


@pytest.mark.parametrize("kind", MODELS)
def test_a_restarted_engine_has_the_same_index_but_another_seed_and_engine_id(
    kind: str, tmp_path: Path, spawned: list[Any]
) -> None:
    launcher = launcher_of(tmp_path, kind, 3, 4, seed=5)
    launcher.vllm_config.ec_transfer_config = ECTransferConfig(engine_id="name")
    for replica in (0, 0, 1, 0):
        start(launcher, replica)
    indexes = [config.parallel_config.data_parallel_index for config in spawned]
    seeds = [config.model_config.seed for config in spawned]
    assert indexes == [3, 3, 4, 3]
    assert [seed == 5 for seed in seeds] == [True, False, True, False]
    assert len(set(seeds)) == 3
    assert len({config.kv_transfer_config.engine_id for config in spawned}) == 4
    assert len({config.ec_transfer_config.engine_id for config in spawned}) == 4
    assert len({config.instance_id for config in spawned}) == 4


def test_the_first_engine_of_a_restarted_head_has_another_engine_id(tmp_path: Path, spawned: list[Any]) -> None:
    for _ in range(2):
        start(launcher_of(tmp_path, "dense", 0), 0)
    assert len({config.kv_transfer_config.engine_id for config in spawned}) == 2


def test_no_engine_samples_as_any_incarnation_of_another_replica(
    tmp_path: Path, spawned: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", used.append)
    monkeypatch.setattr(torch_utils.random, "seed", lambda _: None)
    monkeypatch.setattr(torch_utils.np.random, "seed", lambda _: None)
    launcher = launcher_of(tmp_path, "dense", 0, 1, 2)
    for replica in (0, 1, 2) * 3:
        start(launcher, replica)
    for config in spawned:
        torch_utils.set_random_seed(config.model_config.seed, config.parallel_config.data_parallel_index)
    assert len(set(used)) == 9


def test_each_rank_of_a_group_has_its_number_as_index_and_its_rank_in_the_group(
    tmp_path: Path, spawned: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = launcher_of(tmp_path, "experts", 4, 9, data_parallel_size=2)
    for rank in range(2):
        with pytest.raises(StartedError):
            launcher.start(rank).spawn()
    parallel = [config.parallel_config for config in spawned]
    assert [(each.data_parallel_rank, each.data_parallel_index) for each in parallel] == [(0, 4), (1, 9)]
    assert len({config.kv_transfer_config.engine_id for config in spawned}) == 2


@pytest.mark.parametrize("kind", MODELS)
def test_profilers_of_replicas_write_into_folders_of_their_own(kind: str, tmp_path: Path, spawned: list[Any]) -> None:
    profiler = ProfilerConfig(profiler="torch", torch_profiler_dir=str(tmp_path / "traces"))
    launcher = launcher_of(tmp_path, kind, 3, 4, profiler_config=profiler)
    for replica in (0, 1, 0):
        start(launcher, replica)
    folders = [Path(config.profiler_config.torch_profiler_dir) for config in spawned]
    assert folders == [tmp_path / "traces" / f"replica{number}" for number in (3, 4, 3)]


def test_the_first_engine_of_each_node_runs_its_mooncake_bootstrap_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mooncake_connector, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(mooncake_connector, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
    config = vllm_config(write_model(tmp_path / "model"))
    found = []
    for rank in range(2):
        own = engine_launch.replica_config(copy.deepcopy(config), rank)
        set_identity(own, 6 + rank, 0)
        own.parallel_config.data_parallel_index = 6 + rank
        found.append(mooncake_connector.should_launch_bootstrap_server(own))
    assert found == [True, False]


@pytest.mark.parametrize("kind", MODELS)
def test_workers_on_another_machine_have_the_index_seed_and_store_of_the_engine(
    kind: str, tmp_path: Path, spawned: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines_launch, "WorkersProcess", lambda config, _: pickle.loads(pickle.dumps(config)))
    machines = {"tensor_parallel_size": 2, "nnodes": 2, "distributed_executor_backend": "mp", "seed": 5}
    first = launcher_of(tmp_path, kind, 7, first_incarnation=11, **machines)
    other = launcher_of(tmp_path, kind, 0, node_rank=1, **machines)
    for port in (4001, 4002):
        number, incarnation = first.next_start(0)
        first.meet_at(port)
        start(first, 0)
        ours, theirs = spawned[-1], other.start_workers(number, incarnation, port)
        for name in ("data_parallel_index", "data_parallel_size", "nnodes", "world_size", "master_port", "__class__"):
            assert getattr(theirs.parallel_config, name) == getattr(ours.parallel_config, name)
        assert (ours.parallel_config.data_parallel_index, ours.parallel_config.master_port) == (7, port)
        assert theirs.model_config.seed == ours.model_config.seed
        assert (ours.parallel_config.node_rank, theirs.parallel_config.node_rank) == (0, 1)
        assert theirs.parallel_config.local_world_size == 1
    assert spawned[0].model_config.seed != spawned[1].model_config.seed
