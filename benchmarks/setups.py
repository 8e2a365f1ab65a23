"""The ways to serve one model with several engines that are compared: fleet, vLLM's data parallelism, vllm-router."""

import json
import urllib.request
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from processes import MODEL_NAME, Process, free_port, tool, wait_for

SLEEPING = "vllm_omni_plugin.sim.executor.SleepingExecutor"


@dataclass(frozen=True)
class Engines:
    """What every set-up runs, and how many.

    Attributes:
        model: directory of the model.
        count: engines.
        args: of `vllm serve`, the same for all.
        cores: of each engine, or empty for engines that sleep and need none of their own.
    """

    model: Path
    count: int
    args: tuple[str, ...]
    cores: tuple[str, ...] = ()


@dataclass(frozen=True)
class Front:
    """Where a set-up is asked, and where its engines report.

    Attributes:
        name: of the set-up.
        url: what the load goes to.
        metrics: base URLs whose `/metrics` together tell of all engines.
    """

    name: str
    url: str
    metrics: tuple[str, ...]

    def total(self, name: str) -> float:
        """Sum over all engines of the samples of this name."""
        return sum(_total(url, name) for url in self.metrics)


@dataclass(frozen=True)
class Group:
    """Set-ups that are served by the same processes, one after the other with empty caches.

    Attributes:
        kind: `fleet`, `vllm-dp` or `router`.
        variants: policies, one for each set-up.
    """

    kind: str
    variants: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Group":
        """From `KIND:VARIANT,VARIANT`."""
        kind, _, variants = text.partition(":")
        return cls(kind, tuple(variants.split(",")))

    @property
    def names(self) -> list[str]:
        """What its set-ups are called."""
        return [_NAMES[self.kind].format(variant) for variant in self.variants]


_NAMES = {"fleet": "fleet, {}", "vllm-dp": "vLLM --data-parallel-size", "router": "vllm-router, {}"}


def served(group: Group, engines: Engines, router: Path | None, logs: Path) -> Generator[Front, None, None]:
    """Serve each set-up of a group in turn; what was yielded ends when the next one is asked for.

    Args:
        group: set-ups.
        engines: what they run.
        router: command `vllm-router`, needed for that kind only.
        logs: folder for one log per process.
    """
    match group.kind:
        case "fleet":
            args = ("--omni-dp-size-local", str(engines.count), "--omni-lb-policy", group.variants[0])
            with _server(engines, engines.cores, logs, "fleet", args) as url:
                yield Front(group.names[0], url, (url,))
        case "vllm-dp":
            args = ("--data-parallel-size", str(engines.count), "--api-server-count", "1")
            with _server(engines, engines.cores, logs, "dp", args) as url:
                yield Front(group.names[0], url, (url,))
        case _:
            assert router is not None, "vllm-router is not among the arguments"
            yield from _routed(group, engines, router, logs)


def _routed(group: Group, engines: Engines, router: Path, logs: Path) -> Generator[Front, None, None]:
    with ExitStack() as stack:
        servers = []
        # All of them start at once, as the engines of the other set-ups do.
        for i in range(engines.count):
            cores = engines.cores[i : i + 1]
            # Without that flag the router cannot ask for the tokens of a prompt, and its cache_aware knows no prefixes.
            servers.append(_start(engines, cores, logs, f"server{i}", ("--enable-scale-out",)))
            stack.callback(servers[-1][0].stop)
        for process, url in servers:
            _wait(process, url)
        urls = tuple(url for _, url in servers)
        for variant, name in zip(group.variants, group.names, strict=True):
            for url in urls:
                _post(f"{url}/reset_prefix_cache")
            with _router(router, variant, urls, logs) as url:
                yield Front(name, url, urls)


@contextmanager
def _router(router: Path, policy: str, urls: Sequence[str], logs: Path) -> Iterator[str]:
    port, prometheus = free_port(), free_port()
    command = [str(router), "--policy", policy, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(prometheus), "--worker-urls", *urls]
    process = Process("router", command, logs / f"router-{policy}.log")
    try:
        url = f"http://127.0.0.1:{port}"
        _wait(process, url)
        yield url
    finally:
        process.stop()


@contextmanager
def _server(engines: Engines, cores: Sequence[str], logs: Path, name: str, args: Sequence[str]) -> Iterator[str]:
    process, url = _start(engines, cores, logs, name, args)
    try:
        _wait(process, url)
        yield url
    finally:
        process.stop()


def _start(
    engines: Engines, cores: Sequence[str], logs: Path, name: str, args: Sequence[str] = ()
) -> tuple[Process, str]:
    port = free_port()
    command = [tool("vllm"), "serve", str(engines.model), "--served-model-name", MODEL_NAME, "--enforce-eager"]
    command += ["--host", "127.0.0.1", "--port", str(port), *engines.args, *args]
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if cores:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    return Process(name, command, logs / f"{name}.log", **environment), f"http://127.0.0.1:{port}"


def _wait(process: Process, url: str) -> None:
    def ready() -> bool:
        if process.popen.poll() is not None:
            raise RuntimeError(f"{process.name} has ended: {process.log.read_text()[-2000:]}")
        try:
            _get(f"{url}/health")
        except OSError:
            return False
        return True

    wait_for(ready, f"{process.name} at {url}")


def _total(url: str, name: str) -> float:
    lines = _get(f"{url}/metrics").splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith((name + "{", name + " ")))


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as response:
        body: bytes = response.read()
    return body.decode()


def _post(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30).close()


def sleeping(times: Mapping[str, float]) -> tuple[str, ...]:
    """Arguments that let engines sleep these service times instead of running a model."""
    return ("--distributed-executor-backend", SLEEPING, "--additional-config", json.dumps({"sleeping_executor": times}))
