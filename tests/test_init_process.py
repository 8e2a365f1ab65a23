"""Process 1 of a container: it collects orphans, passes signals on, and takes no exit status from the server."""

import argparse
import os
import pty
import signal
import subprocess
import sys
import time

import pytest

from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.integration.processes import serve_command

_WAIT_S = 30.0
_NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL"]

_LEAVE = "from vllm_omni_plugin.integration.processes.init_process import continue_in_child, leave_process_1\n"
_WITH_ORPHANS = """
import os, signal, subprocess, sys, time
leave_process_1()
# Orphans that end at once, among children whose status the server reads late.
own = [subprocess.Popen(["sh", "-c", f"sleep 0 & exit {code}"]) for code in range(1, 21)]
orphan = int(subprocess.check_output(["sh", "-c", "sleep 60 >/dev/null & echo $!"]))
os.kill(orphan, signal.SIGKILL)
deadline = time.monotonic() + 20
def ended():
    lines = subprocess.check_output(["ps", "-eo", "pid=,ppid=,stat="], text=True).splitlines()
    states = [line.split() for line in lines]
    return [state for state in states if state[1] == "1" and state[2].startswith("Z")]
while ended() and time.monotonic() < deadline:
    time.sleep(0.05)
print("not collected", ended())
print([process.wait() for process in own])
sys.exit(7)
"""


def _may_unshare() -> bool:
    return subprocess.run([*_NAMESPACE, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.skipif(not _may_unshare(), reason="needs the right to create a namespace of processes")
def test_process_1_collects_orphans_and_leaves_the_server_its_childrens_statuses() -> None:
    command = [*_NAMESPACE, sys.executable, "-c", _LEAVE + _WITH_ORPHANS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=False)
    assert done.stdout.splitlines() == ["not collected []", str(list(range(1, 21)))], done.stderr
    assert done.returncode == 7


_COUNTING = """
import os, signal
handled = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
signal.pthread_sigmask(signal.SIG_BLOCK, handled)
continue_in_child()
print("ready", flush=True)
while True:
    received = signal.sigwait(handled)
    print(received.name, flush=True)
    if received == signal.SIGTERM:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handled)
        os.kill(os.getpid(), signal.SIGTERM)
"""


def test_sighup_ends_no_server_with_our_flags(monkeypatch: pytest.MonkeyPatch) -> None:
    class StartedError(Exception):
        pass

    def start() -> None:
        os.kill(os.getpid(), signal.SIGHUP)
        raise StartedError

    monkeypatch.setattr(serve_command, "parse_or_exit", lambda _: OmniConfig())
    monkeypatch.setattr(serve_command, "leave_process_1", start)
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(StartedError):
            serve_command.validate(lambda _: None, argparse.Namespace())
    finally:
        signal.signal(signal.SIGHUP, before)


def test_signals_reach_the_server_and_its_end_by_a_signal_is_told() -> None:
    with subprocess.Popen([sys.executable, "-c", _LEAVE + _COUNTING], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGHUP)
        assert process.stdout.readline() == "SIGHUP\n"
        process.terminate()
        assert process.stdout.readline() == "SIGTERM\n"
        assert process.wait(_WAIT_S) == 128 + signal.SIGTERM


def test_ctrl_c_of_a_terminal_reaches_the_server_once() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", _LEAVE + _COUNTING])
    try:
        _read_until(terminal, b"ready")
        os.write(terminal, b"\x03")
        _read_until(terminal, b"SIGINT")
        # What came before this has been passed on before it, and is handled before it.
        os.kill(pid, signal.SIGTERM)
        assert b"SIGINT" not in _read_until(terminal, b"SIGTERM")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGTERM
    finally:
        os.close(terminal)


def _read_until(terminal: int, text: bytes) -> bytes:
    read, deadline = b"", time.monotonic() + _WAIT_S
    while text not in read:
        assert time.monotonic() < deadline, read
        read += os.read(terminal, 4096)
    return read
