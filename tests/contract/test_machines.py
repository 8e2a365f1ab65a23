"""What the machines of a replica are given: the address where they meet, what must be the same, and the network."""

import os
import select
from pathlib import Path
from typing import Any

import psutil
import pytest

from vllm_omni_plugin.integration.fleet_setup.pipeline_command import local_processes
from vllm_omni_plugin.integration.processes import headless
from vllm_omni_plugin.integration.processes.headless import plan_node, serve_replicas
from vllm_omni_plugin.replicas.machines.first_machine import MachinesLauncher
from vllm_omni_plugin.replicas.machines.meetings import setup_of
from vllm_omni_plugin.replicas.machines.other_machine import MachineSettings
from vllm_omni_plugin.vllm_api.launch.machines_launch import WorkersProcess, use_network_of

from .configs import write_model
from .pipeline_files import JOIN, read

MACHINES = f"--headless {JOIN} -tp 4 --nnodes 2 --master-addr 127.0.0.1 --master-port 29777 --skip-tokenizer-init"
SLOW = "--omni-heartbeat-interval 5 --omni-heartbeat-timeout 20"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=4)


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
