"""The ways to serve one model with several engines that are compared: fleet, vLLM's data parallelism, vllm-router."""

import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

from processes import MODEL_NAME, Process, free_port, start_server, total

SLEEPING = "tests.fakes.sleeping_executor.SleepingExecutor"


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
        url: what the load goes to.
        metrics: base URLs whose `/metrics` together tell of all engines.
        pid: process that listens there.
    """

    url: str
    metrics: tuple[str, ...]
    pid: int

    def total(self, name: str) -> float:
        """Sum over all engines of the samples of this name."""
        return sum(total(url, name) for url in self.metrics)

    def empty_caches(self) -> None:
        """Have all engines forget the prefixes that they know."""
        for url in self.metrics:
            _post(f"{url}/reset_prefix_cache")


@dataclass(frozen=True)
class Setup:
    """One of the ways, its engines being up.

    Attributes:
        name: of the set-up.
        open: makes it take requests for as long as the context lasts.
    """

    name: str
    open: Callable[[], AbstractContextManager[Front]]


@dataclass(frozen=True)
class Group:
    """Set-ups that are served by the same engines, one after the other.

    Attributes:
        kind: `fleet`, `vllm-dp` or `router`.
        variants: policies, one for each set-up; `POLICY+LIMITS` has limits that the benchmark knows by this name.
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


_NO_LIMITS: Mapping[str, Sequence[str]] = MappingProxyType({})
_NAMES = {"fleet": "fleet, {}", "vllm-dp": "vLLM --data-parallel-size", "router": "vllm-router, {}"}


@contextmanager
def served(
    group: Group, engines: Engines, router: Path | None, logs: Path, limits: Mapping[str, Sequence[str]] = _NO_LIMITS
) -> Iterator[list[Setup]]:
    """Run the engines of a group, for its set-ups to be opened in turn.

    Args:
        group: set-ups.
        engines: what they run.
        router: command `vllm-router`, needed for that kind only.
        logs: folder for one log per process.
        limits: arguments of the head or the router that `KIND+LIMITS` stands for, as in `fleet+weights`.
    """
    name, variant = group.names[0], group.variants[0]
    match group.kind:
        case "fleet":
            policy = _with_limits("fleet", variant, limits)
            args: tuple[str, ...] = ("--omni-dp-size-local", str(engines.count), "--omni-lb-policy", *policy)
            with _server(engines, engines.cores, logs, f"fleet-{variant}", args) as front:
                yield [Setup(name, lambda: nullcontext(front))]
        case "vllm-dp":
            args = ("--data-parallel-size", str(engines.count), "--api-server-count", "1")
            with _server(engines, engines.cores, logs, "dp", args) as front:
                yield [Setup(name, lambda: nullcontext(front))]
        case _:
            assert router is not None, "vllm-router is not among the arguments"
            with _servers(engines, logs) as urls:
                yield [
                    Setup(name, partial(_router, router, variant, urls, logs, limits))
                    for variant, name in zip(group.variants, group.names, strict=True)
                ]


@contextmanager
def _servers(engines: Engines, logs: Path) -> Iterator[tuple[str, ...]]:
    with ExitStack() as stack:
        servers = []
        # All of them start at once, as the engines of the other set-ups do.
        for i in range(engines.count):
            cores = engines.cores[i : i + 1]
            # Without that flag the router cannot ask for the tokens of a prompt, and its cache_aware knows no prefixes.
            servers.append(_start(engines, cores, logs, f"server{i}", ("--enable-scale-out",)))
            stack.callback(servers[-1][0].stop)
        for process, url in servers:
            process.wait_until_healthy(url)
        yield tuple(url for _, url in servers)


@contextmanager
def _router(
    router: Path, variant: str, urls: tuple[str, ...], logs: Path, limits: Mapping[str, Sequence[str]]
) -> Iterator[Front]:
    port = free_port()
    command = [str(router), "--policy", *_with_limits("router", variant, limits), "--host", "127.0.0.1"]
    command += ["--port", str(port), "--prometheus-port", str(free_port()), "--worker-urls", *urls]
    # It may be of an environment without this package.
    process = Process("router", command, logs / f"router-{variant}.log", PYTHONPATH="")
    try:
        url = f"http://127.0.0.1:{port}"
        process.wait_until_healthy(url)
        yield Front(url, urls, process.popen.pid)
    finally:
        process.stop()


@contextmanager
def _server(engines: Engines, cores: Sequence[str], logs: Path, name: str, args: Sequence[str]) -> Iterator[Front]:
    process, url = _start(engines, cores, logs, name, args)
    try:
        process.wait_until_healthy(url)
        yield Front(url, (url,), process.popen.pid)
    finally:
        process.stop()


def _start(
    engines: Engines, cores: Sequence[str], logs: Path, name: str, args: Sequence[str] = ()
) -> tuple[Process, str]:
    args = (str(engines.model), "--served-model-name", MODEL_NAME, "--enforce-eager", *engines.args, *args)
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if cores:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    return start_server(name, args, logs / f"{name}.log", **environment)


def _with_limits(kind: str, variant: str, limits: Mapping[str, Sequence[str]]) -> list[str]:
    policy, plus, name = variant.partition("+")
    return [policy, *(limits[f"{kind}+{name}"] if plus else ())]


def _post(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url, method="POST"), timeout=30).close()


def sleeping(times: Mapping[str, object]) -> tuple[str, ...]:
    """Arguments that let engines sleep these service times instead of running a model."""
    return ("--distributed-executor-backend", SLEEPING, "--additional-config", json.dumps({"sleeping_executor": times}))
