"""What the machines of a replica are given: the address where they meet, what must be the same, and the network."""

import os
import select
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import psutil
import pytest
from vllm.v1.engine.utils import CoreEngine

from tests.engine.experts import MIXTRAL
from tests.fakes.engines import FakeProcess
from vllm_omni_plugin.errors import ConfigError, ReplicaError
from vllm_omni_plugin.integration.fleet_setup.pipeline_command import local_processes
from vllm_omni_plugin.integration.processes import headless
from vllm_omni_plugin.integration.processes.headless import plan_node, serve_replicas
from vllm_omni_plugin.replicas.machines.first_machine import MachinesLauncher
from vllm_omni_plugin.replicas.machines.group_machine import RanksLauncher
from vllm_omni_plugin.replicas.machines.meetings import setup_of
from vllm_omni_plugin.replicas.machines.other_machine import MachineSettings
from vllm_omni_plugin.vllm_api.launch import engine_launch
from vllm_omni_plugin.vllm_api.launch.engine_identity import set_identity
from vllm_omni_plugin.vllm_api.launch.engine_launch import EngineProcess
from vllm_omni_plugin.vllm_api.launch.machines_launch import WorkersProcess, use_network_of

from .configs import write_model
from .pipeline_files import JOIN, read

MACHINES = f"--headless {JOIN} -tp 4 --nnodes 2 --master-addr 127.0.0.1 --master-port 29777 --skip-tokenizer-init"
GROUP = MACHINES.replace("-tp 4", "--data-parallel-size 4")
SLOW = "--omni-heartbeat-interval 5 --omni-heartbeat-timeout 20"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=4)


@pytest.fixture
def experts(tmp_path: Path) -> Path:
    return write_model(tmp_path / "experts", **MIXTRAL)


@pytest.fixture(autouse=True)
def own_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undoes what a machine does to the environment."""
    for name in ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "VLLM_WORKER_MULTIPROC_METHOD"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_the_first_machine_waits_at_its_master_address_for_one_engine_over_all(model: Path) -> None:
    plan = plan_node(*read(f"{model} {MACHINES} --node-rank 0"))
    launcher = plan.make_launcher(lambda _: None, report_cache=True, numbers=[3], first_incarnation=9)
    assert isinstance(launcher, MachinesLauncher)
    assert (plan.replicas, launcher.machines, launcher.meeting_address) == (1, 2, ("127.0.0.1", 29777))
    assert launcher.next_start(0) == (3, 9)


def test_another_machine_meets_it_there_with_the_same_setup(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    async def run_machine(machine: Any, *timeouts: float) -> None:
        given.extend(timeouts)

    monkeypatch.setattr(headless, "OtherMachine", lambda settings, *_: given.append(settings))
    monkeypatch.setattr(headless, "run_machine", run_machine)
    assert serve_replicas(*read(f"{model} {MACHINES} --node-rank 1 --omni-join-timeout 7 {SLOW}")) == 0
    settings, *timeouts = given
    assert isinstance(settings, MachineSettings)
    assert (settings.rank, settings.address, settings.first) == (1, "127.0.0.1", "tcp://127.0.0.1:29777")
    assert timeouts == [7.0, 300.0]
    # An engine with an error waits three seconds for the first machine to miss two reports.
    assert (settings.interval, settings.timeout) == (1.0, 20.0)
    plan = plan_node(*read(f"{model} {MACHINES} --node-rank 0"))
    launcher: Any = plan.make_launcher(lambda _: None, report_cache=True, numbers=[3])
    assert settings.setup == setup_of(plan.fingerprint, launcher.layout)
    assert settings.setup["--tensor-parallel-size"] == "4"


def group_launcher(model: Path, machine: int, on_spawn: Callable[[int], None] = lambda _: None) -> Any:
    """That of one machine of a group of four ranks over two machines."""
    plan = plan_node(*read(f"{model} {GROUP} --node-rank {machine}"))
    assert (plan.replicas, plan.lockstep) == (2, True)
    launcher = plan.make_launcher(on_spawn, report_cache=False, numbers=range(3, 5))
    assert isinstance(launcher, RanksLauncher)
    return launcher


@pytest.mark.parametrize(("machine", "ranks"), [(0, (0, 1)), (1, (2, 3))])
def test_a_machine_starts_its_ranks_of_a_group_with_the_coordinator_and_store_of_their_meeting(
    machine: int, ranks: tuple[int, int], experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spawned: dict[int, Any] = {}
    waited: list[Any] = []

    def spawn(config: Any, _executor: Any, _stats: bool, *, engine: int, rank: int, **_: Any) -> Any:
        spawned[engine] = rank, config

        def wait(_input: str, _outputs: Any, coordinator: Any) -> None:
            waited.append((coordinator.proc, *coordinator.get_engine_socket_addresses()))

        core = FakeProcess(engine)
        return SimpleNamespace(wait=wait, core=core, abandon=core.kill)

    monkeypatch.setattr(engine_launch, "spawn_engine", spawn)
    launcher = group_launcher(experts, machine)
    assert (launcher.ranks, launcher.machines, launcher.meeting_address) == (2, 2, ("127.0.0.1", 29777))
    assert (launcher.layout["--nnodes"], launcher.layout["--data-parallel-size"]) == ("2", "4")
    assert [launcher.identity(replica) for replica in range(2)] == [CoreEngine(index=rank).identity for rank in ranks]
    launcher.meet_in(77, 4321, ["tcp://first:1", "tcp://first:2"])
    with ThreadPoolExecutor(2) as threads:
        starts = [threads.submit(launcher.start(replica).wait, "ipc:///nowhere", []) for replica in range(2)]
    assert [start.result() for start in starts] == [None, None]
    assert {index: rank for index, (rank, _) in spawned.items()} == dict(zip(ranks, range(2), strict=True))
    assert waited == 2 * [(None, "tcp://first:1", "tcp://first:2")]
    for _, config in spawned.values():
        parallel = config.parallel_config
        assert (parallel.data_parallel_size, parallel.data_parallel_size_local, parallel.nnodes) == (4, 2, 1)
        assert (parallel.data_parallel_master_ip, parallel._coord_store_port) == ("127.0.0.1", 4321)
        assert not parallel.data_parallel_external_lb
    assert len({config.model_config.seed for _, config in spawned.values()}) == 1
    assert {config.instance_id.rpartition("_replica")[2] for _, config in spawned.values()} == {"3_77", "4_77"}
    launcher.end_ranks()


def test_a_rank_on_another_machine_is_told_the_port_of_the_store(
    experts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    def start_up(_socket: Any, _engines: Any, parallel: Any, *_: Any) -> None:
        told.append((parallel.local_engines_only and parallel.data_parallel_rank > 0, parallel._coord_store_port))
        raise RuntimeError("seen")

    monkeypatch.setattr(engine_launch, "wait_for_engine_startup", start_up)
    launcher = group_launcher(experts, 1)
    config = deepcopy(launcher.vllm_config)
    set_identity(config, 3, 1)
    config.parallel_config._coord_store_port = 4321
    process = SimpleNamespace(config=config, index=2, manager=None, handshake=MagicMock())
    with pytest.raises(ReplicaError, match="seen"):
        EngineProcess.wait(process, "ipc:///in", [], None)  # type: ignore[arg-type]
    assert told == [(False, 4321)], "vLLM 0.33 tells the ranks of other machines nothing"


@pytest.mark.long
def test_the_first_machine_of_a_group_starts_a_coordinator_and_a_store_that_others_reach(experts: Path) -> None:
    pids: list[int] = []
    coordination = group_launcher(experts, 0, pids.append).coordinate()
    assert len(pids) == 1
    assert [address.rpartition(":")[0] for address in coordination.addresses] == ["tcp://127.0.0.1"] * 2
    with socket.create_connection(("127.0.0.1", coordination.port)):
        coordination.end()
    assert select.select([coordination.sentinel], [], [], 30)[0]


def test_a_group_has_no_limit_of_executors_since_each_rank_is_on_one_machine(experts: Path) -> None:
    plan_node(*read(f"{experts} {GROUP} --node-rank 1 --distributed-executor-backend uni"))


def test_ranks_of_a_dense_model_on_several_machines_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="4 ranks of a dense model are independent: instead of --nnodes"):
        plan_node(*read(f"{model} {GROUP} --node-rank 0"))


def test_a_group_that_would_meet_over_ipv6_is_refused(experts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = GROUP.replace("--master-addr 127.0.0.1", "--master-addr ::1")
    assert serve_replicas(*read(f"{experts} {line} --node-rank 0")) == 1
    assert "argument --master-addr: ::1: vLLM's ranks find each other over IPv4 only" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_every_machine_of_a_group_serves_its_ranks(experts: Path, rank: int) -> None:
    assert local_processes(*read(f"{experts} {GROUP} --node-rank {rank}")) == (2, 2)


@pytest.mark.parametrize(("rank", "replicas"), [(0, 1), (1, 0)])
def test_only_the_first_machine_needs_ports_and_all_need_memory_for_their_own_workers(
    model: Path, rank: int, replicas: int
) -> None:
    assert local_processes(*read(f"{model} {MACHINES} --node-rank {rank}")) == (replicas, 2)


def test_a_single_worker_of_a_machine_runs_in_a_process_of_its_own(model: Path) -> None:
    assert local_processes(*read(f"{model} {MACHINES} --node-rank 1 --tensor-parallel-size 2")) == (0, 1)


@pytest.mark.long
def test_the_process_of_a_machines_workers_says_how_it_ended() -> None:
    pids: list[int] = []
    not_a_configuration = None
    process = WorkersProcess(not_a_configuration, pids.append)
    assert pids == [process.pid]
    assert select.select([process.sentinel], [], [], 60)[0]
    assert process.exit_reason() == "the process of its workers exited with code 1"
    process.end()


def test_vllm_and_gloo_use_the_network_of_the_address_unless_the_user_has_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (loopback,) = (name for name, has in psutil.net_if_addrs().items() if "127.0.0.1" in [each.address for each in has])
    use_network_of("127.0.0.1")
    assert (os.environ["VLLM_HOST_IP"], os.environ["GLOO_SOCKET_IFNAME"]) == ("127.0.0.1", loopback)
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.9")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    use_network_of("127.0.0.1")
    assert (os.environ["VLLM_HOST_IP"], os.environ["GLOO_SOCKET_IFNAME"]) == ("10.0.0.9", "eth7")
