"""What an engine whose core was killed leaves behind ends with the engine: workers and shared memory."""

import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import UserDict
from collections.abc import Callable, Iterator
from multiprocessing import Pipe, get_context, resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fakes.shared_memory import share_memory_with_worker
from vllm_omni_plugin.config import FLEET_ENGINE
from vllm_omni_plugin.vllm_api.launch import engine_launch, machines_launch
from vllm_omni_plugin.vllm_api.launch.engine_launch import EngineProcess
from vllm_omni_plugin.vllm_api.launch.fleet_engine import ExitNote, mark_as_fleet_engine
from vllm_omni_plugin.vllm_api.launch.leftovers import kill_marked, marked_processes, unmarked_environment
from vllm_omni_plugin.vllm_api.launch.machines_launch import WorkersProcess

CORE_OF_A_STUCK_WORKER = (
    "import subprocess, sys, time\n"
    "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)\n"
    "time.sleep(600)"
)


class EnvironmentOfSpawning(UserDict[str, str]):
    """Another thread has spawned an engine as soon as somebody has seen its mark."""

    def __iter__(self) -> Iterator[str]:
        for name in list(self.data):
            if name == FLEET_ENGINE:
                del self.data[name]
            yield name


class Core(subprocess.Popen[bytes]):
    """With what `multiprocessing.Process` has."""

    @property
    def exitcode(self) -> int | None:
        return self.poll()

    def is_alive(self) -> bool:
        return self.exitcode is None


def engine_of(core: Any, note: ExitNote, shut_down: Any = lambda timeout: None) -> EngineProcess:
    manager: Any = SimpleNamespace(processes=[core], shutdown=shut_down)
    handshake: Any = SimpleNamespace(close=lambda: None, socket=None)
    config = SimpleNamespace(kv_events_config=None, parallel_config=SimpleNamespace(), cache_config=None)
    return EngineProcess(manager, config, note, handshake, 0, has_workers=True)


def test_the_environment_is_read_while_another_thread_takes_the_mark_out_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", EnvironmentOfSpawning({"A": "1", FLEET_ENGINE: "/proc/1/fd/9", "B": "2"}))
    assert unmarked_environment() == {"A": "1", "B": "2"}


def test_the_process_that_removes_the_shared_memory_of_an_engine_is_not_searched_for() -> None:
    note = ExitNote()
    with mark_as_fleet_engine(note):
        sleeper = [sys.executable, "-c", "import time; time.sleep(600)"]
        tracker, worker = subprocess.Popen([*sleeper, "multiprocessing.resource_tracker"]), subprocess.Popen(sleeper)
    with tracker, worker:
        kill_marked(str(note.path))
        assert worker.wait(10) == -signal.SIGKILL
        assert tracker.poll() is None
        tracker.kill()


def test_a_process_of_a_container_whose_head_has_the_same_process_id_is_not_searched_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readlink, note = os.readlink, ExitNote()
    with mark_as_fleet_engine(note):
        sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with sleeper:
        namespace = f"/proc/{sleeper.pid}/ns/pid"
        monkeypatch.setattr(os, "readlink", lambda path: "pid:[1]" if str(path) == namespace else readlink(path))
        found = marked_processes(str(note.path))
        monkeypatch.undo()
        kill_marked(str(note.path))
        assert sleeper.wait(10) == -signal.SIGKILL
        assert not found


class RunningCore:
    """A core whose worker is stuck.

    Attributes:
        worker: descriptor (pidfd) of the worker.
    """

    def __init__(self) -> None:
        note = ExitNote()
        with mark_as_fleet_engine(note):
            self.core = Core([sys.executable, "-c", CORE_OF_A_STUCK_WORKER], stdout=subprocess.PIPE)
        assert self.core.stdout is not None
        self.worker = os.pidfd_open(int(self.core.stdout.readline()))
        self.engine = engine_of(self.core, note)

    def worker_ends(self, within: float) -> bool:
        return bool(select.select([self.worker], [], [], within)[0])

    def close(self) -> None:
        if not self.worker_ends(0):
            signal.pidfd_send_signal(self.worker, signal.SIGKILL)
        os.close(self.worker)
        self.core.kill()
        self.core.communicate()


@pytest.fixture
def cores() -> Iterator[list[RunningCore]]:
    cores = [RunningCore(), RunningCore()]
    yield cores
    for core in cores:
        core.close()


@pytest.mark.parametrize(
    ("core_runs", "end"),
    [
        (False, lambda engine: engine.shutdown(0.0)),
        (False, EngineProcess.kill),
        (True, EngineProcess.kill),
    ],
    ids=["shut down", "killed", "killed with its core"],
)
def test_a_stuck_worker_ends_with_its_engine_and_that_of_another_engine_does_not(
    cores: list[RunningCore], core_runs: bool, end: Callable[[EngineProcess], None]
) -> None:
    # The other one would be killed first.
    other, ended = cores
    if not core_runs:
        ended.core.kill()
        ended.core.wait()
        assert not ended.worker_ends(0)
    end(ended.engine)
    assert ended.worker_ends(10)
    assert not other.worker_ends(0)


@pytest.mark.parametrize(("code", "searches"), [("0", 0), ("1", 1), ("os.kill(os.getpid(), 9)", 1)])
def test_workers_are_searched_for_unless_their_core_has_returned(
    monkeypatch: pytest.MonkeyPatch, code: str, searches: int
) -> None:
    searched: list[str] = []
    monkeypatch.setattr(engine_launch, "kill_marked", lambda mark: searched.append(mark) or set())
    note = ExitNote()
    engine = engine_of(Core([sys.executable, "-c", f"import os; raise SystemExit({code})"]), note)
    engine.shutdown(0.0)
    assert searched == [str(note.path)] * searches


def test_a_shutdown_returns_when_the_killed_engine_is_gone(cores: list[RunningCore]) -> None:
    core = cores[0].core
    killing = threading.Timer(0.2, core.kill)
    engine = engine_of(core, ExitNote(), lambda timeout: killing.start())
    engine.shutdown(0.0)
    assert select.select([engine.sentinel], [], [], 0)[0]


def hold_memory(told: Any) -> None:
    memory = SharedMemory(create=True, size=4096)
    told.send(memory.name)
    time.sleep(600)


def test_the_shared_memory_of_a_killed_engine_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_launch, "wait_for_engine_startup", lambda *_: None)
    # Otherwise the core would have one of its own, which removes the memory.
    resource_tracker.ensure_running()
    heard, told = Pipe()
    core: Any = get_context("fork").Process(target=hold_memory, args=(told,), daemon=True)
    core.start()
    engine = engine_of(core, ExitNote())
    memory = Path("/dev/shm", heard.recv())
    engine.wait("", [])
    os.kill(core.pid, signal.SIGKILL)
    core.join()
    assert memory.exists()
    engine.shutdown(0.0)
    assert not memory.exists()


def test_the_shared_memory_of_another_machines_workers_is_removed_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines_launch, "run_workers", share_memory_with_worker)
    resource_tracker.ensure_running()
    heard, told = Pipe()
    process = WorkersProcess(told, lambda pid: None)
    memory = Path("/dev/shm", heard.recv())
    assert memory.exists()
    process.end()
    assert not memory.exists()
