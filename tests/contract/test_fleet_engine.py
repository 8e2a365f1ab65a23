"""An engine of a fleet reports how its workers exited."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from vllm_omni_plugin.config import FLEET_ENGINE
from vllm_omni_plugin.vllm_api.launch import engine_launch as launch
from vllm_omni_plugin.vllm_api.launch import fleet_engine
from vllm_omni_plugin.vllm_api.launch.engine_launch import spawn_engine
from vllm_omni_plugin.vllm_api.launch.fleet_engine import ExitNote, FleetExecutor, fleet_executor, mark_as_fleet_engine
from vllm_omni_plugin.vllm_api.launch.spawning import describe_exit

ENOUGH_S = 60.0


def spawned(name: str, target: Any, *args: Any) -> Any:
    process = multiprocessing.get_context("fork").Process(target=target, args=args, name=name, daemon=True)
    process.start()
    return process


def end_by(sign: int) -> None:
    signal.signal(sign, signal.SIG_DFL)
    os.kill(os.getpid(), sign)


def executor_of(*workers: Any) -> FleetExecutor:
    """An executor whose monitor has seen the exit of a worker."""
    executor = FleetExecutor.__new__(FleetExecutor)
    executor.is_failed = True
    executor.workers = [
        SimpleNamespace(proc=process, death_writer=None, worker_response_mq=None) for process in workers
    ]
    return executor


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other workers of these tests never exit by themselves."""
    monkeypatch.setenv("VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", "0")


@pytest.fixture
def exit_note() -> Iterator[ExitNote]:
    note = ExitNote()
    with mark_as_fleet_engine(note):
        yield note


def test_exited_workers_are_named_with_their_signals(exit_note: ExitNote, caplog: pytest.LogCaptureFixture) -> None:
    ill = spawned("VllmWorker-0", end_by, signal.SIGILL)
    alive = spawned("VllmWorker-1", time.sleep, ENOUGH_S)
    ill.join(ENOUGH_S)
    executor_of(ill, alive).shutdown()
    assert exit_note.read() == "its worker VllmWorker-0 was ended by SIGILL"
    assert "This engine exits, because its worker VllmWorker-0 was ended by SIGILL." in caplog.text
    assert not alive.is_alive(), "vLLM's own shutdown has ended it"


def test_an_executor_without_an_engine_core_waits_for_an_exit_and_ends_nothing(exit_note: ExitNote) -> None:
    alive, ill = spawned("VllmWorker-2", time.sleep, ENOUGH_S), spawned("VllmWorker-3", end_by, signal.SIGILL)
    executor_of(alive, ill).wait_for_exit()
    assert exit_note.read() == "its worker VllmWorker-3 was ended by SIGILL"
    assert alive.is_alive()
    alive.kill()


@pytest.mark.parametrize("path", [pytest.param("/proc/0/fd/0", id="its owner is gone"), None])
def test_an_engine_that_cannot_write_its_exit_note_still_exits(
    monkeypatch: pytest.MonkeyPatch, path: str | None
) -> None:
    if path is None:
        monkeypatch.delenv(FLEET_ENGINE, raising=False)
    else:
        monkeypatch.setenv(FLEET_ENGINE, path)
    worker = spawned("VllmWorker-0", end_by, signal.SIGILL)
    alive = spawned("VllmWorker-1", time.sleep, ENOUGH_S)
    worker.join(ENOUGH_S)
    executor_of(worker, alive).shutdown()
    assert not alive.is_alive(), "vLLM's own shutdown has ended it"


def test_only_vllms_own_executor_is_replaced() -> None:
    assert fleet_executor(MultiprocExecutor) is FleetExecutor
    assert fleet_executor(UniProcExecutor) is UniProcExecutor


@pytest.mark.parametrize(
    ("code", "text"),
    [
        (None, "has not ended"),
        (0, "exited with code 0"),
        (1, "exited with code 1"),
        (-signal.SIGKILL, "was ended by SIGKILL"),
        (-40, "was ended by signal 40"),
    ],
)
def test_descriptions_of_exit_codes(code: int | None, text: str) -> None:
    assert describe_exit(code) == text


def test_without_an_exit_note_the_exit_of_the_engine_core_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    core = spawned("EngineCore", end_by, signal.SIGSEGV)
    given: dict[str, Any] = {}

    def manager(**arguments: Any) -> Any:
        given.update(arguments, mark=os.environ[FLEET_ENGINE])
        return SimpleNamespace(processes=[core])

    monkeypatch.setattr(launch, "CoreEngineProcManager", manager)
    config: Any = SimpleNamespace(kv_events_config=None, shutdown_timeout=0)
    starting = spawn_engine(config, MultiprocExecutor, True, engine=0, rank=0, on_spawn=lambda _pid: None)
    assert given["executor_class"] is FleetExecutor
    assert given["mark"].startswith(f"/proc/{os.getpid()}/fd/")
    assert FLEET_ENGINE not in os.environ, "what is spawned later is no engine"
    core.join(ENOUGH_S)
    assert starting.exit_reason() == "it was ended by SIGSEGV"
    starting.abandon()


@pytest.mark.parametrize(("given", "told"), [(0, 1), (30, 30)])
def test_no_engine_aborts_its_requests_on_sigterm(monkeypatch: pytest.MonkeyPatch, given: int, told: int) -> None:
    configs: list[Any] = []

    def manager(*, vllm_config: Any, **_: Any) -> Any:
        configs.append(vllm_config)
        return SimpleNamespace(processes=[SimpleNamespace(pid=os.getpid(), is_alive=lambda: False, exitcode=0)])

    monkeypatch.setattr(launch, "CoreEngineProcManager", manager)
    config: Any = SimpleNamespace(kv_events_config=None, shutdown_timeout=given)
    spawn_engine(config, MultiprocExecutor, True, engine=0, rank=0, on_spawn=lambda _pid: None).abandon()
    assert [config.shutdown_timeout for config in configs] == [told]


@pytest.mark.parametrize(("nnodes", "waited"), [(1, []), (2, [3.0])])
def test_an_error_in_workers_of_several_machines_comes_when_the_lost_machine_may_be_known(
    nnodes: int, waited: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise RuntimeError("Connection closed by peer")

    class Call:
        get_response = staticmethod(fail)

        def result(self) -> None:
            self.get_response()

    slept: list[float] = []
    monkeypatch.setattr(fleet_engine.time, "sleep", slept.append)
    monkeypatch.setattr(MultiprocExecutor, "collective_rpc", lambda *_, **__: Call())
    executor = FleetExecutor.__new__(FleetExecutor)
    executor.parallel_config = SimpleNamespace(nnodes=nnodes)
    with pytest.raises(RuntimeError, match="closed by peer"):
        executor.collective_rpc("execute_model")
    assert slept == waited
