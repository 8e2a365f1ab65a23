"""A real `vllm serve` in a process of its own, started and ended by a test."""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.free_ports import free_port
from vllm_omni_plugin.admin.admin_keys import find_local_key

from .namespaces import at, inside

MODEL = "tiny"
MOVES = "vllm_omni_fleet:request_moves_total"
FAILED = "vllm_omni_fleet:requests_failed_total"
IN_FLIGHT = "vllm_omni_fleet:requests_in_flight"
ASSIGNMENTS = "vllm_omni_fleet:assignments_total"
IN_PROCESS = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
"""The model is computed in the process of its engine, as vLLM does by itself on one GPU. On CPUs it starts a worker."""
WORKERS = ("--distributed-executor-backend", "mp")
"""The model is computed in worker processes of the engine, as vLLM does by itself on CPUs and for several GPUs."""
START_S = 240.0
STOP_S = 30.0
RUST = "vllm-rs"
FRONT_ENDS: dict[str, dict[str, str]] = {
    "python": {},
    # It loads adapters at run time from named folders only.
    RUST: {"VLLM_USE_RUST_FRONTEND": "1", "VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES": tempfile.gettempdir()},
}
"""vLLM's front ends, and how the environment of a server says which one it has."""
_STARTUP = Path(__file__).with_name("startup")
_ROOT = Path(__file__).parents[2]

T = TypeVar("T")


def until(condition: Callable[[], T], what: str, seconds: float = 30.0) -> T:
    """Ask `condition` until it is true or time is up; the way to wait for another process that raises no event here."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.05)


def write_secret(path: Path) -> Path:
    """Make a file with a new secret of a fleet, which only this user can read."""
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


def complete(client: httpx.Client, prompt: str = "Once upon a time", tokens: int = 24, model: str = MODEL) -> str:
    """The greedy answer of so many tokens."""
    body = {"model": model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == httpx.codes.OK, response.text
    return str(response.json()["choices"][0]["text"])


def replicas(client: httpx.Client) -> dict[str, Any]:
    """What the operators' route lists of each replica, by its name."""
    listed = client.get("/omni/replicas").raise_for_status().json()["replicas"]
    return {replica["id"]: replica for replica in listed}


def serve_command(model: Path, *args: str) -> list[str]:
    """The command line of a server or a headless node for the tiny model; short to start."""
    vllm = str(Path(sys.executable).with_name("vllm"))
    return [
        vllm,
        "serve",
        str(model),
        "--served-model-name",
        MODEL,
        "--enforce-eager",
        "--max-model-len",
        "1024",
        "--num-gpu-blocks-override",
        "1024",
        # Exact: in bfloat16 what is computed at once is rounded otherwise than what is computed token by token.
        "--dtype",
        "float32",
        *IN_PROCESS,
        *args,
    ]


def serve_environment(**changes: str) -> dict[str, str]:
    """The environment of a server that downloads nothing and shares two cores."""
    return {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        # vLLM compiles a function of log-probabilities at their first request, also with --enforce-eager.
        "TORCHDYNAMO_DISABLE": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "PYTHONPATH": f"{_STARTUP}:{_ROOT}",
        **changes,
    }


def _listens(path: str) -> bool:
    """Whether a unix socket takes connections. HTTPX leaves its own socket open when one does not."""
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(path) == 0


class ServeProcess:
    """One `vllm serve` process with everything it starts, in a session of its own.

    Args:
        environment: changes to `serve_environment`.
    """

    def __init__(self, command: list[str], log: Path, **environment: str) -> None:
        self.log = log
        self._told_to_end = False
        if not any(word.startswith("--omni-") for word in command):
            # What an engine of a fleet does by itself; see `startup/sitecustomize.py`.
            environment["ASK_FOR_TILES"] = "1"
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                env=serve_environment(**environment),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def tell_to_end(self) -> None:
        """Ask it to end as a user would, and do not wait; once is enough."""
        if not self._told_to_end and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        self._told_to_end = True

    def stop(self) -> None:
        """End it as a user would, and by force what does not end in time."""
        self.tell_to_end()
        if self.process.poll() is None:
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()

    def kill(self) -> None:
        """End the process, and only this one, without notice."""
        self.process.kill()
        self.process.wait()

    def __exit__(self, *_: object) -> None:
        self.stop()


class _ByPath(httpx.BaseTransport):
    """Sends what is for operators to the server that has their routes, everything else as before."""

    def __init__(self, others: httpx.BaseTransport, admin_url: httpx.URL, namespace: str | None) -> None:
        self._others = others
        self._operators = httpx.HTTPTransport(verify=False)
        self._admin_url = admin_url
        self._namespace = namespace

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        to_admin = request.url.port == self._admin_url.port
        if request.url.path.startswith("/omni/") or request.url.path == "/metrics":
            request.url, to_admin = request.url.copy_with(port=self._admin_url.port), True
        if not to_admin:
            return self._others.handle_request(request)
        with inside(self._namespace) if self._namespace else nullcontext():
            return self._operators.handle_request(request)

    def close(self) -> None:
        self._operators.close()
        self._others.close()


class Server(ServeProcess):
    """One running `vllm serve` with an API server. A context manager; leaving it ends everything it started.

    Args:
        namespace: runs it in this network namespace.
        port: TCP port of the API server, any free one if None.
        uds: listen on this unix socket instead, which is reached from any network namespace.
        environment: changes to `serve_environment`.

    Attributes:
        admin_url: of the operator's routes and the fleet's metrics: the server's own, unless it is a head with vLLM's
            Rust front end.
    """

    start_s = START_S

    def __init__(
        self,
        model: Path,
        log: Path,
        *args: str,
        namespace: str | None = None,
        port: int | None = None,
        uds: Path | None = None,
        **environment: str,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._uds = None if uds is None else str(uds)
        where = ["--uds", self._uds] if self._uds else ["--host", "127.0.0.1", "--port", str(self.port)]
        self.admin_url = self.url
        if environment.items() >= FRONT_ENDS[RUST].items() and any(word.startswith("--omni-") for word in args):
            admin_port = free_port()
            where += ["--omni-admin-port", str(admin_port)]
            self.admin_url = f"http://127.0.0.1:{admin_port}"
        self._namespace = namespace
        prefix = at(namespace) if namespace else ()
        super().__init__([*prefix, *self.command(model, *where, *args)], log, **environment)

    def command(self, model: Path, *args: str) -> list[str]:
        """The command line of a server of this kind."""
        return serve_command(model, *args)

    def __enter__(self) -> Self:
        self.wait()
        return self

    def wait(self) -> None:
        """Return once it answers; it is stopped if it does not in time."""
        try:
            until(self._answers, f"{self.url}/health answers; log: {self.log}", self.start_s)
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the server ended with {self.process.returncode}:\n{self.log.read_text()[-4000:]}")
        return self.health() == 200

    def http(self, timeout: float = 10.0) -> httpx.Client:
        """A client of its own for plain requests; paths are enough for URLs, also for those of operators."""
        # Without certificates, which take longer to read than most answers to come, in a test that asks all the time.
        transport: httpx.BaseTransport = httpx.HTTPTransport(uds=self._uds, verify=False)
        if self.admin_url != self.url:
            transport = _ByPath(transport, httpx.URL(self.admin_url), self._namespace)
        return httpx.Client(base_url=self.url, timeout=timeout, transport=transport)

    def operator(self, timeout: float = 10.0) -> httpx.Client:
        """The same for this user's changes to the fleet: it has the key that the head keeps for them, if it has one."""
        client = self.http(timeout)
        if (key := self.local_key) is not None:
            client.headers["Authorization"] = f"Bearer {key}"
        return client

    @property
    def local_key(self) -> str | None:
        """The admin key that it keeps for this user, if it does."""
        return find_local_key("127.0.0.1", self.port)

    def health(self) -> int | None:
        """Status of /health, or None while nothing listens."""
        if self._uds is not None and not _listens(self._uds):
            return None
        try:
            with self.http() as http:
                status = http.get("/health").status_code
                # vLLM's Rust front end does not know whether a replica can serve.
                return status if self.admin_url == self.url else http.get(f"{self.admin_url}/health").status_code
        except httpx.TransportError:
            return None

    def client(self) -> openai.OpenAI:
        """A client that never retries, so that every error is seen."""
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120.0, http_client=self.http(120.0)
        )

    def async_client(self) -> openai.AsyncOpenAI:
        """The same for asyncio."""
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120.0)

    def complete(self, **asked: Any) -> str:
        """As the function of this name, over a connection of its own."""
        with self.http(120.0) as http:
            return complete(http, **asked)

    def replicas(self) -> dict[str, Any]:
        """As the function of this name."""
        with self.http() as http:
            return replicas(http)

    def metrics(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Samples of one name from /metrics, by their sorted labels."""
        with self.http() as http:
            lines = http.get("/metrics").text.splitlines(keepends=True)
        # Only what is asked for: to parse all of it takes longer than many an answer.
        text = "".join(line for line in lines if line.startswith(name))
        return {
            tuple(sorted(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == name
        }

    def total(self, name: str) -> float:
        return sum(self.metrics(name).values())

    def by_replica(self, name: str) -> dict[str, float]:
        return {dict(labels)["replica"]: value for labels, value in self.metrics(name).items()}

    def by_engine(self, name: str) -> dict[str, float]:
        """Samples of one of vLLM's metrics, by its `engine` label; several of an engine are summed."""
        sums: dict[str, float] = {}
        for labels, value in self.metrics(name).items():
            engine = dict(labels)["engine"]
            sums[engine] = sums.get(engine, 0.0) + value
        return sums

    def engine_pids(self) -> dict[int, int]:
        """Process id of the engine that each replica runs now, from the server's log."""
        lines = re.findall(r"Replica 0\.(\d+) serves \(engine process (\d+)\)", self.log.read_text())
        return {int(replica): int(pid) for replica, pid in lines}

    def replicas_up(self) -> int:
        samples = self.metrics("vllm_omni_fleet:replicas")
        return int(sum(value for labels, value in samples.items() if dict(labels)["state"] == "up"))
