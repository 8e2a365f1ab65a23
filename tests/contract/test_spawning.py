"""Processes are spawned one at a time, because vLLM changes global state of the process during a spawn."""

import inspect
import multiprocessing
import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.engine.coordinator import DPCoordinator

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.integration.checks.start_checks import LEAST_SHARED_MEMORY
from vllm_omni_plugin.integration.processes.several_servers import ApiServerLauncher
from vllm_omni_plugin.stages.stage_process import StageParameters, StageProcess
from vllm_omni_plugin.vllm_api.launch import engine_launch as launch
from vllm_omni_plugin.vllm_api.launch.engine_launch import spawn_engine
from vllm_omni_plugin.vllm_api.launch.group_launch import LockstepIncarnation
from vllm_omni_plugin.vllm_api.launch.spawning import SPAWN_LOCK

ENOUGH_S = 30.0
NOT_RUNNING = SimpleNamespace(pid=os.getpid(), is_alive=lambda: False)


class Spawning:
    """Replaces whatever spawns, and records whether the lock was held."""

    def __init__(self) -> None:
        self.guarded: list[bool] = []

    def spawn(self) -> None:
        self.guarded.append(SPAWN_LOCK.locked())

    def manager(self, **_arguments: Any) -> Any:
        self.spawn()
        return SimpleNamespace(processes=[NOT_RUNNING])

    def popen(self, *_command: Any, **_arguments: Any) -> Any:
        self.spawn()
        return NOT_RUNNING

    @property
    def context(self) -> Any:
        process = SimpleNamespace(pid=os.getpid(), start=self.spawn)
        return SimpleNamespace(RawArray=lambda _kind, size: size, Process=lambda **_arguments: process)


@pytest.fixture
def spawning(monkeypatch: pytest.MonkeyPatch) -> Spawning:
    spawning = Spawning()
    monkeypatch.setattr(launch, "CoreEngineProcManager", spawning.manager)
    monkeypatch.setattr(subprocess, "Popen", spawning.popen)
    monkeypatch.setattr(multiprocessing, "get_context", lambda _method: spawning.context)
    return spawning


def start_engine() -> None:
    config: Any = SimpleNamespace(kv_events_config=None, shutdown_timeout=0)
    spawn_engine(config, object, True, engine=0, rank=0, on_spawn=lambda _pid: None).abandon()


def start_api_server() -> None:
    ApiServerLauncher(1, "http://here", None, SimpleNamespace(), lambda _pid: None).start(0)  # type: ignore[arg-type]


def start_stage() -> None:
    StageProcess(StageParameters("stage", "", {}, 0, 0, b"", [])).connection.close()


@pytest.mark.parametrize("other", [start_engine, start_api_server, start_stage])
def test_nothing_is_spawned_while_an_engine_is(spawning: Spawning, other: Callable[[], None]) -> None:
    with ThreadPoolExecutor(2) as threads:
        for start in [threads.submit(start_engine), threads.submit(other)]:
            start.result(ENOUGH_S)
    assert spawning.guarded == [True, True]
    assert not SPAWN_LOCK.locked()


def test_others_are_spawned_while_the_coordinator_of_a_group_loads_but_not_while_it_is_spawned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    guarded: list[bool] = []

    def start(coordinator: Any, *_arguments: Any, **_more: Any) -> None:
        guarded.append(SPAWN_LOCK.locked())
        coordinator._wait_for_zmq_addrs(None)
        raise RuntimeError("started")

    def load(_coordinator: Any, _pipe: Any) -> None:
        guarded.append(SPAWN_LOCK.locked())

    monkeypatch.setattr(DPCoordinator, "__init__", start)
    monkeypatch.setattr(DPCoordinator, "_wait_for_zmq_addrs", load)
    parallel_config = SimpleNamespace(data_parallel_master_ip="127.0.0.1")
    config = SimpleNamespace(parallel_config=parallel_config, logging_config=None)
    with pytest.raises(ReplicaError, match="started"):
        LockstepIncarnation(2, config, lambda _pid: None).coordinate(parallel_config)
    assert guarded == [True, False]
    assert not SPAWN_LOCK.locked()


def test_vllm_starts_no_worker_where_less_memory_is_free_than_its_largest_queue_has() -> None:
    parameters = inspect.signature(MessageQueue).parameters
    assert parameters["max_chunk_bytes"].default * parameters["max_chunks"].default == LEAST_SHARED_MEMORY
