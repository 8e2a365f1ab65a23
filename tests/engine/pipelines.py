"""The example pipelines as a user starts them, and what a test asks about their stages."""

import asyncio
import re
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx

from tests.fakes.free_ports import free_port

from .server import IN_PROCESS, MODEL, ServeProcess, Server, until, write_secret
from .servers import Servers
from .suspended import PATIENT, Engine

EXAMPLES = Path(__file__).parents[2] / "examples" / "pipelines"
START_S = 300.0
"""Two engines and the making of their models at once, on a machine with other work."""
_SERVES = re.compile(r"Replica (\d+)\.(\d+) serves \(engine process (\d+)\)")


class PipelineServer(Server):
    """One example, started with its one command; nodes may join it.

    Args:
        log: file for what it writes; the models and the nodes' logs lie beside it.
    """

    start_s = START_S

    def __init__(self, kind: str, log: Path, *flags: str, **environment: str) -> None:
        self.models = log.with_name(kind)
        self._kind = kind
        self._flags = flags
        self._nodes = 0
        secret = write_secret(log.with_suffix(".secret"))
        self._join = ("-oma", "127.0.0.1", "-omp", str(free_port()), "--omni-secret-file", str(secret))
        # On a machine with other work an engine takes longer than the minute that requests wait for one.
        patient = (*PATIENT, "--omni-replica-wait", str(int(START_S)))
        super().__init__(self.models, log, "--served-model-name", MODEL, *patient, *flags, **environment)

    @contextmanager
    def node(self, stage: int) -> Iterator[None]:
        """A headless node meanwhile runs one more replica of a stage; it has joined."""
        before = self.replicas_up()
        self._nodes += 1
        log = self.log.with_name(f"{self.log.stem}-node-{self._nodes}.log")
        flags = ("--headless", "--omni-stage-id", str(stage), *self._flags)
        node = ServeProcess(self.command(self.models, *flags), log)
        try:
            self.wait_for_replicas(before + 1)
            yield
        finally:
            node.stop()

    def engine(self, stage: int, replica: int = 0) -> Engine:
        found = {(int(s), int(r)): int(pid) for s, r, pid in _SERVES.findall(self.log.read_text())}
        return Engine(found[stage, replica])

    def by_stage(self, name: str) -> dict[int, float]:
        """Samples of one of our metrics, by stage; those of its replicas are summed."""
        sums: dict[int, float] = {}
        for labels, value in self.metrics(name).items():
            stage = int(dict(labels)["stage"])
            sums[stage] = sums.get(stage, 0.0) + value
        return sums

    def by_replica_of(self, stage: int, name: str) -> dict[int, float]:
        samples = ((dict(labels), value) for labels, value in self.metrics(name).items())
        return {int(labels["replica"]): value for labels, value in samples if int(labels["stage"]) == stage}

    def in_flight(self, stage: int) -> float:
        return self.by_stage("vllm_omni_fleet:requests_in_flight")[stage]

    def assigned(self) -> dict[int, float]:
        """Requests that have been sent to replicas so far, by stage."""
        return self.by_stage("vllm_omni_fleet:assignments_total")

    def wait_for_replicas(self, count: int) -> None:
        """Return when exactly so many replicas of all stages take requests."""
        until(lambda: self.replicas_up() == count, f"{count} replicas take requests", START_S)

    def wait_until_idle(self) -> None:
        """Return when neither the head nor any engine has anything left of any request."""
        names = ("vllm_omni_fleet:requests_in_flight", "vllm:num_requests_running", "vllm:num_requests_waiting")
        until(lambda: not any(self.total(name) for name in names), "nothing is left of any request")

    @contextmanager
    def suspended(self, stage: int) -> Iterator[Engine]:
        """The engine of a stage's local replica stands still meanwhile."""
        engine = self.engine(stage)
        engine.suspend()
        try:
            yield engine
        finally:
            engine.resume()

    @contextmanager
    def drained(self, stage: int) -> Iterator[None]:
        """The stage's local replica takes no new request meanwhile."""
        with self.operator() as http:
            http.post(f"/omni/replicas/{stage}.0/drain").raise_for_status()
            try:
                yield
            finally:
                http.post(f"/omni/replicas/{stage}.0/resume").raise_for_status()

    def command(self, model: Path, *args: str) -> list[str]:
        script = str(EXAMPLES / "serve.py")
        return [sys.executable, script, self._kind, "--models", str(model), *self._join, *IN_PROCESS, *args]


class ExampleWorld:
    """Requests to an example, for `tests.pipeline.scenarios`.

    Args:
        path: where they go.
        body: of each of them.
        check: takes the JSON of an answer; raises AssertionError unless it is that of the models run by hand.
    """

    def __init__(
        self, server: PipelineServer, path: str, body: dict[str, Any], check: Callable[[Any], None], replicas: int
    ) -> None:
        self._server, self._path, self._body = server, path, {"model": MODEL, **body}
        self._check = check
        self._replicas = replicas

    async def ask(self) -> Any:
        async with httpx.AsyncClient(base_url=self._server.url, timeout=START_S) as client:
            response = await client.post(self._path, json=self._body)
            assert response.status_code == httpx.codes.OK, response.text
            return response.json()

    async def check(self, answer: Any) -> None:
        await asyncio.to_thread(self._check, answer)

    @asynccontextmanager
    async def halted_in(self, stage_id: int) -> AsyncIterator["ExampleCall"]:
        with self._server.suspended(stage_id) as self._engine:
            call = ExampleCall(asyncio.create_task(self.ask()))
            await asyncio.to_thread(until, lambda: self._server.in_flight(stage_id) == 1, "the stage has the request")
            yield call

    async def kill(self, stage_id: int) -> None:
        self._engine.core.kill()

    async def rests(self) -> None:
        await asyncio.to_thread(self._server.wait_for_replicas, self._replicas)
        await asyncio.to_thread(self._server.wait_until_idle)


class ExampleCall:
    """One of them."""

    def __init__(self, asking: "asyncio.Task[Any]") -> None:
        self._asking = asking

    async def answer(self) -> Any:
        return await self._asking

    async def leave(self) -> None:
        self._asking.cancel()
        with suppress(asyncio.CancelledError):
            await self._asking


def shared_example(
    servers: Servers, kind: str, replicas: int, *flags: str, **environment: str
) -> Iterator[PipelineServer]:
    """For a fixture: an example whose replicas all serve before each test, and after it, with nothing left to do."""
    server: PipelineServer = servers.keep(
        kind, lambda log: PipelineServer(kind, log, *flags, **environment).__enter__(), engines=2
    )
    server.wait_for_replicas(replicas)
    yield server
    server.wait_for_replicas(replicas)
    server.wait_until_idle()
