"""Engines do not outlive the process that started them, however it ends."""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import closing

import psutil
import pytest

from vllm_omni_plugin.config import FLEET_ENGINE
from vllm_omni_plugin.replicas.engine.reaper import KILL_TIMEOUT_S, Reaper
from vllm_omni_plugin.vllm_api.launch.leftovers import marked_processes

SLEEPER = [sys.executable, "-c", "import time; time.sleep(600)"]
PARENT_OF_A_SLEEPER = [
    sys.executable,
    "-c",
    "import subprocess, sys, time\n"
    "print(subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']).pid, flush=True)\n"
    "time.sleep(600)",
]
OWNER = [
    sys.executable,
    "-c",
    "import subprocess, sys, time\n"
    "from vllm_omni_plugin.replicas.engine.reaper import Reaper\n"
    f"engine = subprocess.Popen({PARENT_OF_A_SLEEPER!r}, stdout=subprocess.PIPE)\n"
    "reaper = Reaper()\n"
    "reaper.watch(engine.pid)\n"
    "print(engine.pid, int(engine.stdout.readline()), flush=True)\n"
    "time.sleep(600)",
]


OWNER_OF_A_KILLED_ENGINE = [
    sys.executable,
    "-c",
    "import os, subprocess, sys, time\n"
    "from vllm_omni_plugin.config import FLEET_ENGINE\n"
    "from vllm_omni_plugin.replicas.engine.reaper import Reaper\n"
    "mark = {FLEET_ENGINE: f'/proc/{os.getpid()}/fd/9'}\n"
    f"engine = subprocess.Popen({PARENT_OF_A_SLEEPER!r}, stdout=subprocess.PIPE, env=os.environ | mark)\n"
    "reaper = Reaper()\n"
    "reaper.watch(engine.pid)\n"
    "worker = int(engine.stdout.readline())\n"
    "engine.kill()\n"
    "engine.wait()\n"
    "if sys.argv[1] == 'closed':\n"
    "    os.closerange(3, 1024)\n"
    "    time.sleep(0.5)\n"
    "print(worker, flush=True)\n"
    "time.sleep(600)",
]


def ends(fd: int) -> bool:
    return bool(select.select([fd], [], [], 10)[0])


@pytest.mark.parametrize("stopped", [False, True])
def test_engines_and_their_workers_are_killed_with_their_parent(stopped: bool) -> None:
    with subprocess.Popen(OWNER, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        fds = [os.pidfd_open(int(pid)) for pid in owner.stdout.readline().split()]
        assert len(fds) == 2
        if stopped:
            signal.pidfd_send_signal(fds[0], signal.SIGSTOP)
        owner.kill()
        assert [ends(fd) for fd in fds] == [True, True]
        for fd in fds:
            os.close(fd)


@pytest.mark.parametrize("files", ["open", "closed"])
def test_a_worker_whose_engine_has_ended_before_is_killed_with_the_owner(files: str) -> None:
    """Also if the owner's files are closed before it has ended, as those of a killed process are."""
    with subprocess.Popen([*OWNER_OF_A_KILLED_ENGINE, files], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        worker = os.pidfd_open(int(owner.stdout.readline()))
        owner.kill()
        assert ends(worker)
        os.close(worker)


def test_the_reaper_is_no_process_of_an_engine_that_is_being_spawned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mark = f"/proc/{os.getpid()}/fd/9"
    monkeypatch.setenv(FLEET_ENGINE, mark)
    with subprocess.Popen(SLEEPER) as engine, closing(Reaper()) as reaper:
        reaper.watch(engine.pid)
        (marked,) = marked_processes(mark)
        signal.pidfd_send_signal(marked, signal.SIGKILL)
        assert engine.wait() == -signal.SIGKILL
        os.close(marked)


def test_closing_kills_the_engines_and_does_not_wait_for_the_end_of_this_process() -> None:
    with subprocess.Popen(SLEEPER) as engine:
        reaper = Reaper()
        reaper.watch(engine.pid)
        closed_at = time.monotonic()
        reaper.close()
        assert engine.wait() == -signal.SIGKILL
        assert time.monotonic() - closed_at < KILL_TIMEOUT_S


def test_a_process_of_another_parent_is_not_killed() -> None:
    with subprocess.Popen(PARENT_OF_A_SLEEPER, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        grandchild = os.pidfd_open(pid)
        with closing(Reaper()) as reaper:
            reaper.watch(pid)
        assert not select.select([grandchild], [], [], 0)[0]
        signal.pidfd_send_signal(grandchild, signal.SIGKILL)
        os.close(grandchild)
        parent.kill()


def test_a_killed_reaper_is_replaced_by_one_with_all_engines() -> None:
    with subprocess.Popen(SLEEPER) as first, subprocess.Popen(SLEEPER) as second:
        try:
            others = set(psutil.Process().children())
            with closing(Reaper()) as reaper:
                reaper.watch(first.pid)
                (child,) = {process.pid for process in set(psutil.Process().children()) - others}
                os.kill(child, signal.SIGKILL)
                os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
                reaper.watch(second.pid)
            engines = map(psutil.Process, (first.pid, second.pid))
            ended = [engine.pid for engine in psutil.wait_procs(engines, 10)[0]]
        finally:
            first.kill()
            second.kill()
    assert first.pid in ended


def test_a_reaper_without_engines_starts_no_process_and_closes_twice() -> None:
    reaper = Reaper()
    reaper.close()
    reaper.close()
    with pytest.raises(RuntimeError, match="closed"):
        reaper.watch(1)
