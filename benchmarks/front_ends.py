"""The front ends that `rust_front_end.py` compares: started, and what their processes use."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import psutil
from processes import PYTHON_PATH, Process, free_port, start_server, tool
from setups import sleeping

RUST = {"VLLM_USE_RUST_FRONTEND": "1"}
ENGINES, HTTP, REST = "engines", "vllm-rs", "rest"
"""What a process is. The fleet process is of the last kind, and so is SMG."""


class Engines(NamedTuple):
    """Number, the seconds of a prompt's token beside 5 ms a step, and more arguments of `vllm serve`."""

    number: int
    prefill_token_s: float
    args: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        """Arguments of `vllm serve` for one of them."""
        times = {"step_s": 0.005, "prefill_token_s": self.prefill_token_s}
        return ["--enforce-eager", "--max-model-len", "4096", *sleeping(times), *self.args]


@dataclass
class Served:
    """A front end that was started with its engines.

    Attributes:
        name: of the front end.
        model: what requests have to call it.
        url: where it answers.
        admin: where a fleet's own metrics are.
        started: what was started for it; the first one is the server.
    """

    name: str
    model: str
    url: str
    admin: str
    started: Sequence[Process]

    def processes(self) -> list[tuple[str, psutil.Process]]:
        """The server's and their kinds."""
        root = psutil.Process(self.started[0].popen.pid)
        return [(_kind(process), process) for process in (root, *root.children(recursive=True))]

    def cpu(self, *kinds: str) -> dict[str, float]:
        """Processor seconds until now of these kinds, or else of all but the engines."""
        seconds = dict.fromkeys(kinds or (HTTP, REST), 0.0)
        for kind, process in self.processes():
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                if kind in seconds:
                    seconds[kind] += times.user + times.system
        return seconds

    def cpu_since(self, before: dict[str, float]) -> dict[str, float]:
        """What has been added to an earlier `cpu()`."""
        return {kind: seconds - before[kind] for kind, seconds in self.cpu(*before).items()}

    def memory(self) -> float:
        """MiB that the server's processes but the engines do not share with others."""
        own = 0.0
        for kind, process in self.processes():
            with suppress(psutil.NoSuchProcess):
                own += process.memory_full_info().uss / 2**20 if kind != ENGINES else 0.0
        return own

    def stop(self) -> None:
        """End all of it, also the engines of SMG, which are in sessions of their own."""
        children = [process for _, process in self.processes()] if self.started[0].popen.poll() is None else []
        for process in self.started:
            process.stop()
        for child in children:
            with suppress(psutil.NoSuchProcess):
                child.kill()


def _kind(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        command = process.cmdline()
        if "EngineCore" in " ".join(command):
            return ENGINES
        if command and command[0].endswith("vllm-rs"):
            return HTTP
    return REST


Start = Callable[[Engines, Path, Path, Path], Served]
"""Takes the engines, the model's folder, one for logs, and that of SMG."""


def _vllm(engines: Engines, model: Path, logs: Path, _: Path) -> Served:
    return _server("vLLM Rust", engines, model, logs, "--data-parallel-size", str(engines.number), **RUST)


def _fleet(engines: Engines, model: Path, logs: Path, _: Path) -> Served:
    return rust_fleet("fleet, Rust", engines, model, logs, "--omni-dp-size-local", str(engines.number))


def _least_queue_fleet(engines: Engines, model: Path, logs: Path, _: Path) -> Served:
    """With the policy of vLLM's data parallelism; that of a fleet also searches for cached prefixes by default."""
    policy = ("--omni-lb-policy", "least-queue-length")
    number = str(engines.number)
    return rust_fleet("fleet, Rust, least-queue-length", engines, model, logs, "--omni-dp-size-local", number, *policy)


def _remote_fleet(engines: Engines, model: Path, logs: Path, _: Path) -> Served:
    master = ("-oma", "127.0.0.1", "-omp", str(free_port()), "--omni-insecure")
    served = rust_fleet("fleet, Rust, remote replica", engines, model, logs, "--omni-dp-size-local", "0", *master)
    node = [tool("vllm"), "serve", str(model), "--headless", *engines.flags, *master]
    served.started = [*served.started, Process("node", node, logs / "node.log")]
    return served


def rust_fleet(name: str, engines: Engines, model: Path, logs: Path, *args: str) -> Served:
    """A fleet behind vLLM's Rust front end, with these arguments."""
    admin = free_port()
    served = _server(name, engines, model, logs, "--omni-admin-port", str(admin), *args, **RUST)
    served.admin = f"http://127.0.0.1:{admin}"
    return served


def _server(name: str, engines: Engines, model: Path, logs: Path, *args: str, **environment: str) -> Served:
    environment["VLLM_LOGGING_LEVEL"] = "WARNING"
    process, url = start_server(name, (str(model), *engines.flags, *args), logs / f"{name}.log", **environment)
    return Served(name, str(model), url, url, [process])


def _smg(engines: Engines, model: Path, logs: Path, smg: Path) -> Served:
    """Started by the interpreter that has vLLM, as its `serve` wants. It calls a model by its folder."""
    port, sockets = str(free_port()), logs / "smg"
    sockets.mkdir(mode=0o700, exist_ok=True)
    command = [sys.executable, "-m", "smg", "serve", "--backend", "vllm", "--connection-mode", "zmq"]
    command += ["--data-parallel-size", str(engines.number), "--host", "127.0.0.1", "--port", port]
    command += ["--worker-base-port", str(free_port()), "--router-prometheus-port", str(free_port())]
    command += ["--router-log-level", "warn", "--model", str(model), "--router-model-path", str(model), *engines.flags]
    environment = {"PYTHONPATH": f"{PYTHON_PATH}:{smg}", "SMG_ZMQ_SOCKET_DIR": str(sockets)}
    process = Process("SMG", command, logs / "smg.log", VLLM_LOGGING_LEVEL="WARNING", **environment)
    return Served("SMG", str(model), f"http://127.0.0.1:{port}", "", [process])


FRONT_ENDS: dict[str, Start] = {
    "vllm": _vllm,
    "smg": _smg,
    "fleet": _fleet,
    "least-queue": _least_queue_fleet,
    "remote": _remote_fleet,
}
