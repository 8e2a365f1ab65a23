"""Plain vLLM, or a head and nodes with an engine each, as processes below this one; used by `gpu_check`."""

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

NAME = "model"
PROMPTS = [f"Story {number}: once upon a time" for number in range(8)]
TOKENS = 200
"""Of each answer."""
ENGINES = {
    "cuda": ["--gpu-memory-utilization", "0.3", "--enable-sleep-mode"],
    # In one process, as on one GPU.
    "cpu": ["--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"],
}
ENVIRONMENT = {
    "cuda": {},
    "cpu": {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"},
}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any]) -> float:
    """Wait for another process, until the step's time is up. Returns the seconds that it took."""
    start = time.monotonic()
    while not condition():
        time.sleep(0.05)
    return round(time.monotonic() - start, 1)


def tree(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """A process and its descendants."""
    try:
        root = psutil.Process(process.pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


@dataclass
class Fleet:
    """The processes of one way to serve, all below this one, and calls of the server."""

    device: str
    engine: list[str]
    common: list[str]
    secret: Path
    folder: Path
    port: int = field(default_factory=free_port)
    master: int = field(default_factory=free_port)
    server: "subprocess.Popen[bytes] | None" = None
    nodes: "list[subprocess.Popen[bytes]]" = field(default_factory=list)
    logs: list[Path] = field(default_factory=list)

    def _start(self, *flags: str, **environment: str) -> "subprocess.Popen[bytes]":
        self.logs.append(self.folder / f"{len(list(self.folder.iterdir())):02}.log")
        command = [
            sys.executable,
            "-P",
            "-W",
            "ignore",
            "-m",
            "vllm.entrypoints.cli.main",
            "serve",
            *self.common,
            *flags,
        ]
        with self.logs[-1].open("wb") as log:
            known = {**os.environ, **ENVIRONMENT[self.device], "HF_HUB_OFFLINE": "1", "VLLM_SERVER_DEV_MODE": "1"}
            return subprocess.Popen(
                command, env=known | environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )

    def _of_the_fleet(self) -> list[str]:
        address = ["--omni-master-address", "127.0.0.1", "--omni-master-port", str(self.master)]
        return [*address, "--omni-secret-file", str(self.secret)]

    def start_single(self) -> None:
        """Plain vLLM, without a flag of ours."""
        self.server = self._start("--port", str(self.port), *self.engine)

    def start_head(self) -> None:
        flags = ["--port", str(self.port), "--omni-dp-size-local", "0", "--omni-lb-policy", "round-robin"]
        self.server = self._start(*flags, *self._of_the_fleet(), VLLM_TARGET_DEVICE="cpu")

    def start_node(self) -> None:
        flags = ["--headless", *self._of_the_fleet(), "--omni-join-timeout", "0", "--omni-drain-timeout", "5"]
        self.nodes.append(self._start(*flags, *self.engine))

    def is_up(self, replicas: int = 0) -> bool:
        """Whether it serves, with so many replicas. A node that ended is started again, as a supervisor would."""
        for node in [node for node in self.nodes if node.poll() is not None]:
            self.nodes.remove(node)
            self.start_node()
        if self.server is not None and self.server.poll() is not None:
            raise RuntimeError(f"the server ended with code {self.server.returncode}")
        try:
            if not replicas:
                self.call("GET", "/health")
                return True
            return [replica["status"] for replica in self.replicas()].count("up") == replicas
        except (OSError, http.client.HTTPException, RuntimeError):
            return False

    def replicas(self) -> list[dict[str, Any]]:
        """What the head says of each replica."""
        found: list[dict[str, Any]] = json.loads(self.call("GET", "/omni/replicas"))["replicas"]
        return found

    def request(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request(method, path, body and json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RuntimeError(f"{path}: {response.status} {response.read()[:200].decode(errors='replace')}")
        return response

    def call(self, method: str, path: str, body: Any = None) -> str:
        return self.request(method, path, body).read().decode()

    def answers(
        self, *, at_once: bool, tokens: int = TOKENS, started: Callable[[], None] | None = None
    ) -> list[str | None]:
        """The answers to PROMPTS; None for one that failed. `started` is called when all have begun."""
        texts: list[str | None] = [None] * len(PROMPTS)
        begun: set[int] = set()

        def answer(index: int) -> None:
            body = {"model": NAME, "prompt": PROMPTS[index], "max_tokens": tokens, "temperature": 0, "stream": True}
            text = ""
            with contextlib.suppress(OSError, http.client.HTTPException, RuntimeError, ValueError):
                response = self.request("POST", "/v1/completions", body | {"ignore_eos": True})
                for line in response:
                    if line == b"data: [DONE]\n":
                        texts[index] = text
                    elif line.startswith(b"data: "):
                        text += json.loads(line[6:])["choices"][0]["text"]
                        begun.add(index)

        threads = [threading.Thread(target=answer, args=(index,), daemon=True) for index in range(len(PROMPTS))]
        for thread in threads:
            thread.start()
            if not at_once:
                thread.join()
        if started is not None:
            until(lambda: len(begun) == len(PROMPTS))
            started()
        for thread in threads:
            thread.join()
        return texts

    def memory_mib(self) -> int:
        """Used on the GPU by all; on a CPU the resident memory of the nodes."""
        if self.device == "cuda":
            query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            return int(subprocess.run(query, capture_output=True, text=True, check=True, timeout=20).stdout.split()[0])
        used = 0
        for member in [member for node in self.nodes for member in tree(node)]:
            with contextlib.suppress(psutil.Error):
                used += member.memory_info().rss
        return used >> 20

    def cpu_seconds(self) -> dict[str, float]:
        """Used so far, by what runs: the server with its engine or coordinator, and each node with its engine."""
        found = {}
        for number, process in enumerate([self.server, *self.nodes]):
            name = f"node {number}" if number else "server"
            found[name] = 0.0
            for member in tree(process) if process is not None else ():
                with contextlib.suppress(psutil.Error):
                    found[name] += sum(member.cpu_times()[:2])
        return found

    def kill_engine(self) -> None:
        """SIGKILL the engine of the first node."""
        for member in tree(self.nodes[0]):
            if "EngineCore" in " ".join([*member.cmdline(), member.name()]):
                return member.kill()
        raise RuntimeError("the first node has no process named EngineCore")

    def stop(self) -> None:
        running = [process for process in (*self.nodes, self.server) if process is not None]
        members = [member for process in running for member in tree(process)]
        for process in running:
            process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(members, timeout=20)
        for member in alive:
            with contextlib.suppress(psutil.Error):
                member.kill()
        self.nodes, self.server = [], None
