"""The coordinator in its own process: light, restarted on the same ports, never orphaned."""

import contextlib
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from coordinator_support import eventually, free_address, names, process_status

from tests.fakes.keeping import Keep
from vllm_omni_plugin.coordinator import (
    OmniCoordClientForHub,
    OmniCoordClientForStage,
    OmniCoordinatorRuntime,
)
from vllm_omni_plugin.coordinator.process import runtime as runtime_module
from vllm_omni_plugin.coordinator.process.coordinator_process import CoordinatorProcess
from vllm_omni_plugin.curve.zap_handler import RESERVED_DESCRIPTORS
from vllm_omni_plugin.errors import OmniError


@pytest.fixture
def runtime(keep: Keep) -> OmniCoordinatorRuntime:
    return keep(OmniCoordinatorRuntime(heartbeat_timeout=3.0))


def process_of(runtime: OmniCoordinatorRuntime) -> int:
    assert runtime.process_id is not None
    return runtime.process_id


def runs(pid: int) -> bool:
    return process_status(pid).get("State", "Z")[0] != "Z"


def test_it_is_small_and_runs_in_its_own_process(runtime: OmniCoordinatorRuntime) -> None:
    status = process_status(process_of(runtime))
    assert int(status["PPid"]) == os.getpid()
    resident_kib = int(status["VmRSS"].removesuffix(" kB"))
    assert resident_kib < 60 * 1024


def test_stopped_process_is_killed_and_replaced_on_the_same_ports(keep: Keep, caplog: pytest.LogCaptureFixture) -> None:
    runtime = keep(OmniCoordinatorRuntime(heartbeat_timeout=3.0, answer_timeout=5.0))
    addresses, stopped = (runtime.router_address, runtime.pub_address), process_of(runtime)
    keep(OmniCoordClientForStage(runtime.router_address, "tcp://a:1", "tcp://a:2", 0, heartbeat_interval=0.1))
    os.kill(stopped, signal.SIGSTOP)
    eventually(lambda: runtime.process_id not in (None, stopped))
    assert not runs(stopped)
    assert "did not answer for 5 s" in caplog.text
    assert (runtime.router_address, runtime.pub_address) == addresses
    hub = keep(OmniCoordClientForHub(runtime.pub_address))
    eventually(lambda: names(hub.get_replica_list()) == ["a"])


def test_healthy_process_is_not_restarted(keep: Keep, monkeypatch: pytest.MonkeyPatch) -> None:
    checks = threading.Semaphore(0)
    is_alive = CoordinatorProcess.is_alive

    def counted(child: CoordinatorProcess, timeout: float) -> bool:
        checks.release()
        return is_alive(child, timeout)

    monkeypatch.setattr(CoordinatorProcess, "is_alive", counted)
    runtime = keep(OmniCoordinatorRuntime(answer_timeout=5.0))
    first = process_of(runtime)
    assert all(checks.acquire(timeout=20) for _ in range(4))
    assert runtime.process_id == first


def test_process_that_does_not_start_in_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "START_TIMEOUT", 0.0)
    with pytest.raises(OmniError, match=r"was not ready after 0\.0 s"):
        OmniCoordinatorRuntime()


def test_restart_fails_until_the_port_is_free_again(
    keep: Keep, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Time for the test to take the port before the restart does.
    monkeypatch.setattr(runtime_module, "FIRST_DELAY", 1.0)
    monkeypatch.setattr(runtime_module, "MAX_DELAY", 1.0)
    runtime = keep(OmniCoordinatorRuntime())
    port = int(runtime.router_address.rpartition(":")[2])
    os.kill(process_of(runtime), signal.SIGKILL)
    eventually(lambda: runtime.process_id is None)
    with socket.create_server(("127.0.0.1", port)):
        eventually(lambda: "could not be restarted" in caplog.text)
    assert runtime.router_address in caplog.text
    eventually(lambda: "was restarted" in caplog.text)
    assert runs(process_of(runtime))


def test_given_port_is_the_one_for_replicas(keep: Keep) -> None:
    address = free_address()
    runtime = keep(OmniCoordinatorRuntime(port=int(address.rpartition(":")[2])))
    assert runtime.router_address == address
    assert runtime.pub_address != runtime.router_address


@pytest.mark.parametrize("hangs", [False, True])
def test_close_ends_the_process_even_if_it_hangs_and_is_idempotent(
    monkeypatch: pytest.MonkeyPatch, hangs: bool
) -> None:
    runtime = OmniCoordinatorRuntime()
    pid = process_of(runtime)
    if hangs:
        monkeypatch.setattr(runtime_module, "STOP_TIMEOUT", 0.1)
        os.kill(pid, signal.SIGSTOP)
    runtime.close()
    assert not runs(pid)
    assert runtime.process_id is None
    runtime.close()


def test_process_dies_with_its_parent_although_a_fork_holds_its_pipe() -> None:
    code = """if True:
        import os, time
        from vllm_omni_plugin.coordinator import OmniCoordinatorRuntime
        runtime = OmniCoordinatorRuntime()
        fork = os.fork()
        if fork:
            print(runtime.process_id, fork, flush=True)
        time.sleep(600)
    """
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert parent.stdout is not None
    coordinator, fork = (int(pid) for pid in parent.stdout.readline().split())
    assert runs(coordinator)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    try:
        eventually(lambda: not runs(coordinator))
        assert runs(fork)
    finally:
        os.kill(fork, signal.SIGKILL)


def test_child_may_have_as_many_connections_as_the_system_allows(runtime: OmniCoordinatorRuntime) -> None:
    limits = Path(f"/proc/{runtime.process_id}/limits").read_text().splitlines()
    soft, hard = next(line.split()[3:5] for line in limits if line.startswith("Max open files"))
    assert soft == hard


def test_process_out_of_descriptors_cuts_new_connections_and_goes_on(
    keep: Keep, capfd: pytest.CaptureFixture[str]
) -> None:
    runtime = OmniCoordinatorRuntime(heartbeat_timeout=1000.0, settle_time=0.0)
    hub = keep(OmniCoordClientForHub(runtime.pub_address))
    client = keep(OmniCoordClientForStage(runtime.router_address, "tcp://a:1", "tcp://a:2", 0, heartbeat_interval=0.1))
    eventually(lambda: names(hub.get_replica_list()) == ["a"])
    pid = process_of(runtime)
    _, most = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    held = len(os.listdir(f"/proc/{pid}/fd"))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (held + RESERVED_DESCRIPTORS, most))
    host, _, port = runtime.router_address.removeprefix("tcp://").rpartition(":")
    peers = [socket.create_connection((host, int(port)), timeout=20) for _ in range(3 * RESERVED_DESCRIPTORS)]
    for peer in peers:
        with contextlib.suppress(ConnectionResetError):
            while peer.recv(4096):
                pass
        peer.close()
    client.update_info(queue_length=9)
    eventually(lambda: [info.queue_length for info in hub.get_replica_list().replicas] == [9])
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (most, most))
    keep(OmniCoordClientForStage(runtime.router_address, "tcp://b:1", "tcp://b:2", 0))
    eventually(lambda: names(hub.get_replica_list()) == ["a", "b"])
    runtime.close()
    assert capfd.readouterr().err.count("no descriptor left") == 1
