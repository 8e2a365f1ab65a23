"""Processes are spawned one at a time, whoever starts them: vLLM changes globals of the process meanwhile."""

import multiprocessing
import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import coordinator as vllm_coordinator

from tests.engine.experts import MIXTRAL
from vllm_omni_plugin.integration.processes.api_server_process import ApiServerProcesses
from vllm_omni_plugin.stages.assignment import Assignment
from vllm_omni_plugin.stages.stage_process import StageProcess
from vllm_omni_plugin.vllm_api.launch import engine_launch as launch
from vllm_omni_plugin.vllm_api.launch.engine_launch import spawn_engine
from vllm_omni_plugin.vllm_api.launch.group_launch import LockstepGeneration, split_ranks
from vllm_omni_plugin.vllm_api.launch.spawning import SPAWNING

from .configs import vllm_config, write_model

ENOUGH_S = 30.0
NOT_RUNNING = SimpleNamespace(pid=os.getpid(), is_alive=lambda: False)


class Spawning:
    """Notices what is spawned while another could be, and stands in for what spawns."""

    def __init__(self) -> None:
        self.guarded: list[bool] = []

    def spawn(self) -> None:
        self.guarded.append(SPAWNING.locked())

    def manager(self, **_arguments: Any) -> Any:
        """vLLM's process manager."""
        self.spawn()
        return SimpleNamespace(processes=[NOT_RUNNING])

    def popen(self, *_command: Any, **_arguments: Any) -> Any:
        """The process of a Python stage."""
        self.spawn()
        return NOT_RUNNING

    @property
    def context(self) -> Any:
        """Multiprocessing's, whose processes do nothing."""
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
    config: Any = SimpleNamespace(kv_events_config=None)
    spawn_engine(config, object, True, 0, 0, lambda _pid: None).abandon()


def start_api_server() -> None:
    ApiServerProcesses(1, "http://here", None, SimpleNamespace(), lambda _pid: None).start(0)  # type: ignore[arg-type]


def start_stage() -> None:
    StageProcess(Assignment("stage", "", {}, 0, 0, b"", [])).connection.close()


@pytest.mark.parametrize("other", [start_engine, start_api_server, start_stage])
def test_nothing_is_spawned_while_an_engine_is(spawning: Spawning, other: Callable[[], None]) -> None:
    with ThreadPoolExecutor(2) as threads:
        for start in [threads.submit(start_engine), threads.submit(other)]:
            start.result(ENOUGH_S)
    assert spawning.guarded == [True, True]
    assert not SPAWNING.locked()


class CoordinatorProcess:
    """The process of a group's coordinator, as vLLM starts it; it tells its addresses when the test says so."""

    name = "coordinator"
    pid = os.getpid()

    def __init__(self, spawn: Callable[[], None]) -> None:
        self._spawn = spawn
        self._addresses, self._telling = multiprocessing.Pipe(duplex=False)
        self.sentinel = os.eventfd(0, os.EFD_CLOEXEC)
        self.started = threading.Event()

    @property
    def context(self) -> Any:
        """Multiprocessing's, which starts this process."""
        theirs = SimpleNamespace(close=lambda: None)
        return SimpleNamespace(Pipe=lambda duplex: (self._addresses, theirs), Process=lambda **_arguments: self)

    def start(self) -> None:
        self._spawn()
        self.started.set()

    def tell_addresses(self) -> None:
        self._telling.send(("tcp://stats", "tcp://out", "tcp://in"))

    def is_alive(self) -> bool:
        return False

    def kill(self) -> None:
        os.eventfd_write(self.sentinel, 1)

    def join(self) -> None:
        """It has ended."""


@pytest.fixture
def group_config(tmp_path: Path) -> Any:
    """The configuration of a lockstep group. vLLM may start a process to make it, so it comes before `spawning`."""
    return split_ranks(vllm_config(write_model(tmp_path, **MIXTRAL), data_parallel_size=2)).config


def test_an_engine_is_spawned_while_the_coordinator_of_a_group_loads_but_not_while_it_is_spawned(
    group_config: Any, spawning: Spawning, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = CoordinatorProcess(spawning.spawn)
    monkeypatch.setattr(vllm_coordinator, "get_mp_context", lambda: coordinator.context)
    generation = LockstepGeneration(2, group_config, lambda _pid: None)
    with ThreadPoolExecutor(2) as threads:
        loading = threads.submit(generation.coordinate, group_config.parallel_config)
        try:
            threads.submit(start_engine).result(ENOUGH_S)
            assert coordinator.started.wait(ENOUGH_S)
            threads.submit(start_engine).result(ENOUGH_S)
        finally:
            coordinator.tell_addresses()
        assert loading.result(ENOUGH_S).get_engine_socket_addresses() == ("tcp://in", "tcp://out")
    assert spawning.guarded == [True, True, True]
    generation.end()
    generation.join()
