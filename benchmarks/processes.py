"""Heads, headless nodes and simulated replicas as processes, for the benchmarks that need several at once."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType

# All servers are on this machine: a proxy that the environment names must not come between, here or in what we start.
os.environ["no_proxy"] = os.environ["NO_PROXY"] = "127.0.0.1,localhost"

MODEL_NAME = "tiny"
WORDS = ("request", "replica", "engine", "answer", "queue", "burst", "quiet", "long", "short", "first", "last", "next")
TOKENS_PER_WORD = 2.4
"""Of these."""
START_S = 240.0
STOP_S = 20.0
COMMON = ("--served-model-name", MODEL_NAME, "--enforce-eager", "--max-model-len", "4096")
PYTHON_PATH = f"{Path(__file__).with_name('startup')}:{Path(__file__).parents[1]}"
"""Has the folder of what Python processes do first, and this project for the executor of engines that sleep."""


class Process:
    """One command with everything it starts, in a session of its own.

    Args:
        name: for errors.
        command: its command line.
        log: file for what it writes.
        environment: changes to ours.
    """

    def __init__(self, name: str, command: list[str], log: Path, **environment: str) -> None:
        self.name = name
        self.log = log
        fixed = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
        fixed["PYTHONPATH"] = PYTHON_PATH
        with log.open("wb") as output:
            self.popen = subprocess.Popen(
                command,
                env=os.environ | fixed | environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_until_healthy(self, url: str) -> None:
        """Return when the server at this URL answers. Raises RuntimeError if this process ends, or takes too long."""
        wait_for(lambda: self.is_running() and _is_healthy(url), f"{self.name} at {url}")

    def is_running(self) -> bool:
        """True. Raises RuntimeError with the end of its log if it has ended."""
        if self.popen.poll() is not None:
            raise RuntimeError(f"{self.name} has ended: {self.log.read_text(errors='replace')[-3000:]}")
        return True

    def kill(self) -> None:
        """End it, and only it, without notice."""
        self.popen.kill()
        self.popen.wait()

    def stop(self) -> None:
        """End it in order, or by force with all it started."""
        if self.popen.poll() is not None:
            return
        self.popen.send_signal(signal.SIGTERM)
        try:
            self.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.popen.pid, signal.SIGKILL)
            self.popen.wait()


class Cluster:
    """A head and what joins it, on loopback. A context manager; leaving it ends everything.

    Args:
        model: directory of the model.
        logs: folder for one log per process.
    """

    _head: Process

    def __init__(self, model: Path, logs: Path) -> None:
        self._model = str(model)
        self._logs = logs
        self._stack = ExitStack()
        self._started = 0
        self.url = f"http://127.0.0.1:{free_port()}"
        self.master_port = free_port()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @property
    def _master(self) -> tuple[str, ...]:
        return ("-oma", "127.0.0.1", "-omp", str(self.master_port), "--omni-insecure")

    def head(self, *args: str, **environment: str) -> Process:
        """Start the head with these arguments beside those that open the fleet."""
        where = ("--host", "127.0.0.1", "--port", self.url.rpartition(":")[2])
        self._head = self._start(
            "head", tool("vllm"), "serve", self._model, *COMMON, *where, *self._master, *args, **environment
        )
        return self._head

    def node(self, *args: str, **environment: str) -> Process:
        """Start a headless node."""
        return self._start(
            "node", tool("vllm"), "serve", self._model, *COMMON, "--headless", *self._master, *args, **environment
        )

    def sim(self, *args: str) -> Process:
        """Start a process with simulated replicas."""
        return self._start("sim", tool("vllm-omni-plugin"), "sim", self._model, *COMMON, *self._master, *args)

    def wait_until_healthy(self) -> None:
        """Return when the head answers. Raises RuntimeError if it does not in time."""
        self._head.wait_until_healthy(self.url)

    def _start(self, name: str, *command: str, **environment: str) -> Process:
        self._started += 1
        process = Process(name, list(command), self._logs / f"{self._started}-{name}.log", **environment)
        self._stack.callback(process.stop)
        return process


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Ask `condition()` until it is true. Raises RuntimeError after START_S."""
    deadline = time.monotonic() + START_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {START_S:.0f} s: {what}")
        time.sleep(0.1)


def total(url: str, name: str, *labels: str) -> float:
    """Sum of the samples with this name and these labels in a server's metrics."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    found = [line for line in lines if line.startswith((name + "{", name + " ")) and all(x in line for x in labels)]
    return sum(float(line.rpartition(" ")[2]) for line in found)


def _is_healthy(url: str) -> bool:
    try:
        urllib.request.urlopen(f"{url}/health", timeout=10).close()
    except OSError:
        return False
    return True


def start_server(name: str, args: Sequence[str], log: Path, **environment: str) -> tuple[Process, str]:
    """Start `vllm serve` with these arguments on a free loopback port; returns its process and its URL."""
    port = free_port()
    command = [tool("vllm"), "serve", *args, "--host", "127.0.0.1", "--port", str(port)]
    return Process(name, command, log, **environment), f"http://127.0.0.1:{port}"


@contextmanager
def serving(name: str, args: Sequence[str], log: Path, **environment: str) -> Iterator[str]:
    """A `vllm serve` with these arguments until the block ends; yields its URL once it answers."""
    process, url = start_server(name, args, log, **environment)
    try:
        process.wait_until_healthy(url)
        yield url
    finally:
        process.stop()


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def tool(name: str) -> str:
    """A console script of this interpreter's environment."""
    return str(Path(sys.executable).with_name(name))


def percentile(values: list[float], share: float) -> float:
    """The value below which this share (0 to 1) of the others lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]
