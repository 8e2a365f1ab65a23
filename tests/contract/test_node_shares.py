"""The cores and devices of a node that each engine gets."""

import asyncio
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.utils import torch_utils
from vllm.utils.torch_utils import OMP_NUM_THREADS_SET_BY_VLLM
from vllm.v1.engine import utils as engine_utils

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.vllm_api.launch import engine_launch as launch
from vllm_omni_plugin.vllm_api.launch.engine_launch import (
    EngineLauncher,
    EngineProcess,
    assign_devices,
    divide_cores,
    spawn_engine,
)
from vllm_omni_plugin.vllm_api.launch.spawning import DeviceTurns, NodeShare

from .configs import vllm_config, write_model

SWITCH = "VLLM_CPU_SIM_MULTI_NUMA"


class StartedError(Exception):
    """Raised in place of the start of an engine."""


def platform(kind: str, devices: int = 8) -> Any:
    """vLLM's platform of a node, with physical ids that differ from the logical ones."""
    ids = list(range(100, 100 + devices))
    return SimpleNamespace(is_cpu=lambda: kind == "cpu", device_id_to_physical_device_id=ids.__getitem__)


def stage(world_size: int = 1, chosen: list[int] | None = None, **bound: Any) -> Any:
    parallel = SimpleNamespace(
        world_size=world_size,
        local_world_size=world_size,
        assigned_physical_gpu_ids=chosen,
        **{"numa_bind": False, "numa_bind_nodes": None, "numa_bind_cpus": None, **bound},
    )
    return SimpleNamespace(parallel_config=parallel)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "current_platform", platform("cuda"))


@pytest.mark.usefixtures("gpus")
def test_stages_get_consecutive_devices() -> None:
    first, second = stage(world_size=2), stage()
    taken = assign_devices(first, 0, 2)
    assert taken == 4
    assert assign_devices(second, taken, 3) == 3
    assert first.parallel_config.assigned_physical_gpu_ids == [100, 101, 102, 103]
    assert second.parallel_config.assigned_physical_gpu_ids == [104, 105, 106]


@pytest.mark.usefixtures("gpus")
def test_devices_are_among_those_that_the_user_chose() -> None:
    second = stage(chosen=[7, 5, 3])
    assert assign_devices(second, 1, 2) == 2
    assert second.parallel_config.assigned_physical_gpu_ids == [5, 3]


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("chosen", [None, [7, 5, 3]])
def test_more_devices_than_there_are_is_an_error(chosen: list[int] | None) -> None:
    with pytest.raises(ConfigError, match="2 replicas of 4 devices need devices 2 to 9, and this node has fewer"):
        assign_devices(stage(world_size=4, chosen=chosen), 2, 2)


@pytest.mark.usefixtures("gpus")
def test_engines_on_later_devices_are_bound_to_the_numa_nodes_of_these() -> None:
    nodes, cpus = [0, 0, 0, 0, 1, 1, 1, 1], [f"{core}" for core in range(8)]
    second = stage(numa_bind=True, numa_bind_nodes=nodes, numa_bind_cpus=cpus)
    assign_devices(second, 3, 2)
    parallel = second.parallel_config
    assert (parallel.numa_bind_nodes, parallel.numa_bind_cpus) == ([0, 1], ["3", "4"])


@pytest.mark.usefixtures("gpus")
def test_numa_nodes_that_vllm_finds_are_those_of_the_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "get_auto_numa_nodes", lambda: [0, 0, 1, 1])
    second = stage(numa_bind=True)
    assign_devices(second, 1, 2)
    assert second.parallel_config.numa_bind_nodes == [0, 1]
    monkeypatch.setattr(launch, "get_auto_numa_nodes", lambda: None)
    unknown = stage(numa_bind=True)
    assign_devices(unknown, 1, 2)
    assert unknown.parallel_config.numa_bind_nodes is None


@pytest.mark.usefixtures("gpus")
def test_a_device_without_a_numa_node_is_an_error_that_names_the_flag() -> None:
    with pytest.raises(
        ConfigError, match="--numa-bind-nodes: it has 2 entries, and must have one for each device up to 3"
    ):
        assign_devices(stage(numa_bind=True, numa_bind_nodes=[0, 1]), 2, 2)


@pytest.mark.parametrize(
    ("kind", "engines", "users", "threads"),
    [
        pytest.param("cuda", 8, None, "4", id="eight engines of two workers"),
        pytest.param("cuda", 1, None, None, id="one engine, which vLLM limits"),
        pytest.param("cuda", 8, "5", "5", id="limited by the user"),
        pytest.param("cpu", 8, None, None, id="CPU engines have cores of their own"),
    ],
)
def test_engines_divide_the_cores_for_loading(
    monkeypatch: pytest.MonkeyPatch, kind: str, engines: int, users: str | None, threads: str | None
) -> None:
    seen: list[tuple[str | None, str | None]] = []

    def manager(**_: Any) -> Any:
        seen.append((os.environ.get("OMP_NUM_THREADS"), os.environ.get(OMP_NUM_THREADS_SET_BY_VLLM)))
        raise StartedError

    monkeypatch.setattr(launch, "CoreEngineProcManager", manager)
    monkeypatch.setattr(launch, "current_platform", platform(kind))
    monkeypatch.setattr(torch_utils, "available_cpu_count", lambda: 64)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if users is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", users)
    config = stage(world_size=2)
    config.shutdown_timeout = 0
    with pytest.raises(StartedError):
        spawn_engine(config, object, True, engine=0, rank=0, on_spawn=lambda _pid: None, engines=engines)
    # vLLM drops its own limit after the start, but not one of the user's.
    assert seen == [(threads, "1" if threads is not None and users is None else None)]
    assert os.environ.get("OMP_NUM_THREADS") == users


@pytest.mark.parametrize(("is_rocm", "timeout", "given"), [(True, 0.0, 15.0), (True, 3.0, 3.0), (False, 0.0, 0.0)])
def test_an_engine_on_rocm_gets_time_to_free_its_memory(
    monkeypatch: pytest.MonkeyPatch, is_rocm: bool, timeout: float, given: float
) -> None:
    waited: list[float] = []
    reader, writer = os.pipe()
    os.close(writer)
    engine: Any = SimpleNamespace(
        manager=SimpleNamespace(shutdown=lambda timeout: waited.append(timeout)),
        config=SimpleNamespace(kv_events_config=None),
        sentinel=reader,
        has_workers=False,
    )
    monkeypatch.setattr(engine_utils, "current_platform", SimpleNamespace(is_rocm=lambda: is_rocm))
    EngineProcess.shutdown(engine, timeout)
    os.close(reader)
    assert waited == [given]


async def test_engines_of_two_stages_on_one_device_start_one_after_the_other() -> None:
    turns = DeviceTurns()
    one, other = (
        EngineLauncher(
            stage(chosen=chosen), object, True, lambda _pid: None, numbers=range(2), share=NodeShare(turns=turns)
        )
        for chosen in ([7, 5], [5, 3])
    )
    order: list[str] = []

    async def start(launcher: EngineLauncher, replica: int, name: str) -> None:
        async with launcher.turn(replica):
            order.append(f"{name} starts")
            await may_go_on.wait()
            order.append(f"{name} is ready")

    may_go_on = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        for launcher, replica, name in ((one, 0, "7"), (one, 1, "5"), (other, 0, "5 again"), (other, 1, "3")):
            tasks.create_task(start(launcher, replica, name))
        await asyncio.sleep(0)
        assert order == ["7 starts", "5 starts", "3 starts"]
        may_go_on.set()
    assert order.index("5 is ready") < order.index("5 again starts")


@pytest.mark.parametrize(
    ("cores", "engines", "bound", "shares"),
    [
        pytest.param(6, 3, "auto", True, id="enough for the stage with the most workers"),
        pytest.param(5, 3, "auto", False, id="too few cores"),
        pytest.param(6, 1, "auto", False, id="one engine"),
        pytest.param(6, 3, "0-1|2-3|4-5", False, id="bound by the user"),
    ],
)
def test_engines_share_the_cores(
    monkeypatch: pytest.MonkeyPatch, cores: int, engines: int, bound: str, shares: bool
) -> None:
    # Set first, so that what is set here is taken back.
    monkeypatch.setenv(SWITCH, "")
    monkeypatch.delenv(SWITCH)
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", bound)
    monkeypatch.setattr(launch, "current_platform", platform("cpu"))
    monkeypatch.setattr(launch.os, "sched_getaffinity", lambda _pid: set(range(cores)))
    divide_cores([stage(world_size=1), stage(world_size=2)], engines)
    assert (launch.os.environ.get(SWITCH) == "1") is shares


@pytest.mark.parametrize(("kind", "rank"), [("cpu", 4), ("cuda", 1)])
def test_an_engine_has_its_number_in_the_fleet_and_its_share_of_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, rank: int
) -> None:
    spawned: list[tuple[int, int]] = []

    def spawn(config: Any, _executor: Any, _stats: bool, *, engine: int, rank: int, **_: Any) -> Any:
        assert config.parallel_config.data_parallel_rank_local == rank
        spawned.append((engine, rank))
        return SimpleNamespace(process=SimpleNamespace(pid=1))

    config = vllm_config(write_model(tmp_path / "model"))
    node = platform(kind)
    node.is_cuda_alike = lambda: kind == "cuda"
    node.is_xpu = lambda: False
    monkeypatch.setattr(launch, "current_platform", node)
    monkeypatch.setattr(launch, "spawn_engine", spawn)
    launcher = EngineLauncher(config, object, True, lambda _pid: None, numbers=(8, 9), share=NodeShare(3, 5))
    launcher.start(1)
    assert spawned == [(9, rank)]
    assert launcher.identity(1) == b"\x09\x00"
