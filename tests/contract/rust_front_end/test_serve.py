"""The head's main loop, with the real program: signals at any time, and all that may fail while it starts or serves."""

import asyncio
import gc
import os
import signal
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from vllm.entrypoints.launchers.launcher import create_server_socket
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import FinishReason
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from tests.contract.configs import vllm_config
from tests.fakes.conditions import eventually
from tests.fakes.free_ports import free_port
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.errors import ConfigError, OmniError, ReplicaError
from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages
from vllm_omni_plugin.integration.options.admin_address import admin_address
from vllm_omni_plugin.integration.rust_front_end.admin_server import AdminServer
from vllm_omni_plugin.integration.rust_front_end.process import ListeningSockets
from vllm_omni_plugin.integration.rust_front_end.serve import Server, listen
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ReplicaJoined
from vllm_omni_plugin.vllm_api.versions.serve_arguments import make_arg_parser

from .head import HERE, answers_itself, is_running
from .played import PATIENCE_S, READY, RustFleet


class StartedFleet(RustFleet):
    """Implements the part of `Fleet` that the head's main loop uses.

    Attributes:
        engines: what `start` returns or raises, as soon as `loaded` is set, which `close` does too.
        closed_after: the timeouts of its `close` calls.
        may_close: what they wait for.
        waits: the timeouts of its `wait_for_requests` calls.
        processes: ids of those that it watches.
    """

    def __init__(self, replicas: int = 2) -> None:
        super().__init__(replicas)
        self.worker_ranks = self.calls.worker_ranks
        self.engines: list[list[bytes]] | OmniError = [[READY] * replicas]
        self.loaded = threading.Event()
        self.closed_after: list[float | None] = []
        self.may_close = threading.Event()
        self.may_close.set()
        self.waits: list[float] = []
        self.processes: list[int] = []

    def start(self) -> list[list[bytes]]:
        assert self.loaded.wait(PATIENCE_S)
        if self.closed_after:
            raise ReplicaError("the fleet was closed while it started")
        if isinstance(self.engines, OmniError):
            raise self.engines
        return self.engines

    def watch(self, process: int) -> None:
        self.processes.append(process)

    def wait_for_requests(self, timeout: float) -> float:
        self.waits.append(timeout)
        return 0.0

    def cancel_wait(self) -> None:
        pass

    def close(self, timeout: float | None = None) -> None:
        self.closed_after.append(timeout)
        self.loaded.set()
        assert self.may_close.wait(PATIENCE_S)


class Started:
    """A head that runs, and a client."""

    def __init__(self, fleet: StartedFleet, server: Any, client: httpx.AsyncClient) -> None:
        self.fleet = fleet
        self.server = server
        self.client = client
        self.running = asyncio.create_task(server.run())

    async def serves(self) -> None:
        self.fleet.loaded.set()
        await self.starts(2)

    async def starts(self, processes: int) -> None:
        await eventually(lambda: len(self.fleet.processes) == processes or self.running.done(), f"process {processes}")

    async def ends(self) -> None:
        """Return when it has ended, or raise its error. Nothing is left."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.shield(self.running)
        finally:
            assert self.fleet.closed_after
            assert not gc.get_freeze_count()
            assert not any(map(is_running, self.fleet.processes))

    def ask(self, **body: Any) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(self.client.post("/v1/completions", json={"model": "tiny", "prompt": "red", **body}))

    async def requested(self) -> str:
        states = self.fleet.orchestrator.request_states
        await eventually(lambda: states, "the request")
        return next(iter(states))


@pytest.fixture(scope="module")
def config(tiny_model: Path) -> Any:
    return vllm_config(tiny_model)


@pytest.fixture(autouse=True)
def own_folder(sockets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    yield
    unregister_vllm_metrics()


@pytest.fixture
def start(tiny_model: Path, config: Any) -> Any:
    @asynccontextmanager
    async def start(
        *arguments: str, fleet: StartedFleet | None = None, admin_port: int | None = None
    ) -> AsyncIterator[Started]:
        port = free_port()
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(
            [str(tiny_model), "--host", HERE, "--port", str(port), "--served-model-name", "tiny", *arguments]
        )
        args.model, args.shutdown_timeout = args.model_tag, 10
        http = create_server_socket((HERE, port), reuse_port=False)
        async with (
            fleet or StartedFleet() as served,
            httpx.AsyncClient(base_url=f"http://{HERE}:{port}", timeout=PATIENCE_S) as client,
        ):
            served.stages = FleetStages(None, [config])
            options = OmniConfig(admin_port=admin_port or free_port())
            started = Started(served, Server(served, args, options, ListeningSockets(http, None), config), client)
            try:
                yield started
            finally:
                for _ in range(2):
                    started.server.on_signal(signal.SIGTERM)
                await asyncio.wait((started.running,), timeout=PATIENCE_S)
                http.close()

    return start


def send(signum: int) -> None:
    os.kill(os.getpid(), signum)


async def test_it_serves_when_engines_do(start: Any) -> None:
    admin_port = free_port()
    async with start(admin_port=admin_port) as head, httpx.AsyncClient() as operator:
        health = partial(operator.get, f"http://{HERE}:{admin_port}/health")
        await head.starts(1)
        with pytest.raises(httpx.ConnectError):
            await head.ask()
        # One of its replicas may serve already.
        assert (await health()).status_code == 503
        await head.serves()
        assert (await health()).status_code == 200
        answers_itself(head.fleet)
        assert (await head.ask()).status_code == 200
        send(signal.SIGTERM)
        await head.ends()
        assert head.fleet.closed_after == [None]


async def test_a_signal_while_engines_load_ends_it(start: Any) -> None:
    async with start() as head:
        await head.starts(1)
        send(signal.SIGTERM)
        await head.ends()
        assert set(head.fleet.closed_after) == {0.0}


async def test_a_signal_while_it_waits_for_a_replica_ends_it(start: Any) -> None:
    async with start(fleet=StartedFleet(replicas=0)) as head:
        head.fleet.loaded.set()
        await head.starts(1)
        send(signal.SIGINT)
        await head.ends()


async def test_it_serves_with_the_first_replica_that_joins(start: Any) -> None:
    async with start(fleet=StartedFleet(replicas=0)) as head:
        head.fleet.loaded.set()
        await head.starts(1)
        head.fleet.join(head.fleet.pool.add(0))
        head.fleet.link.give(ReplicaJoined(0, 0, READY))
        await head.starts(2)
        answers_itself(head.fleet)
        assert (await head.ask()).status_code == 200


@pytest.mark.parametrize("replicas", [0, 2])
async def test_it_fails_with_the_orchestrator(start: Any, replicas: int) -> None:
    async with start(fleet=StartedFleet(replicas)) as head:
        head.fleet.loaded.set()
        await head.starts(2 if replicas else 1)
        head.fleet.link.close()
        with pytest.raises(OmniError, match="the orchestrator has failed"):
            await head.ends()


async def test_it_fails_with_an_engine_that_does_not_start(start: Any) -> None:
    async with start() as head:
        await head.starts(1)
        head.fleet.engines = ReplicaError("replica 0.0 did not start")
        head.fleet.loaded.set()
        with pytest.raises(ReplicaError, match="did not start"):
            await head.ends()


async def test_it_fails_with_wrong_arguments_while_engines_load(start: Any, capfd: pytest.CaptureFixture[str]) -> None:
    async with start("--response-role", "other") as head:
        with pytest.raises(OmniError, match=r"\(process \d+\) .* 2 .*before it served"):
            await head.ends()
    assert "response_role" in capfd.readouterr().err


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM])
async def test_a_front_end_that_is_killed_while_engines_load_is_replaced(start: Any, signum: int) -> None:
    async with start() as head:
        await head.starts(1)
        if signum == signal.SIGTERM:
            await eventually(lambda: handles(signum, head.fleet.processes[0]), "its handlers")
        os.kill(head.fleet.processes[0], signum)
        if signum != signal.SIGSTOP:
            await eventually(lambda: not is_running(head.fleet.processes[0]), "its end")
        ended, _ = await asyncio.wait((head.running,), timeout=0.2)
        assert not ended
        head.fleet.loaded.set()
        await head.starts(3)
        answers_itself(head.fleet)
        assert (await head.ask()).status_code == 200


def handles(signum: int, process: int) -> bool:
    status = Path(f"/proc/{process}/status").read_text()
    return bool(int(status.partition("SigCgt:")[2].split()[0], 16) >> signum - 1 & 1)


def test_with_any_free_port_the_operators_have_the_next_one(tiny_model: Path) -> None:
    args = make_arg_parser(FlexibleArgumentParser()).parse_args([str(tiny_model), "--host", HERE, "--port", "0"])
    with ExitStack() as resources:
        port = listen(args, resources).http.getsockname()[1]
        assert admin_address(OmniConfig(), args) == (HERE, port + 1)


@pytest.mark.filterwarnings("ignore:unclosed")  # vLLM leaves it to the end of the process
def test_a_taken_port_of_grpc_is_an_error_of_its_flag(tiny_model: Path) -> None:
    with create_server_socket((HERE, 0), reuse_port=False) as taken, ExitStack() as resources:
        taken.listen()
        port = taken.getsockname()[1]
        line = [str(tiny_model), "--host", HERE, "--port", "0", "--grpc-port", str(port)]
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
        with pytest.raises(ConfigError, match=f"--grpc-port: {HERE} port {port} cannot be bound on this machine: Addr"):
            listen(args, resources)


async def test_a_port_that_another_takes_while_engines_load_is_an_error_of_its_flag(start: Any) -> None:
    async with start() as head:
        await head.starts(1)
        with create_server_socket((HERE, port := head.client.base_url.port), reuse_port=False) as other:
            other.listen()
            head.fleet.loaded.set()
            with pytest.raises(ConfigError, match=f"--port: {HERE} port {port} cannot be bound on this machine: Addr"):
                await head.ends()


async def test_a_taken_admin_port_leaves_nothing(start: Any) -> None:
    port = free_port()
    with create_server_socket((HERE, port), reuse_port=False) as taken:
        taken.listen()
        async with start(admin_port=port) as head:
            with pytest.raises(ConfigError, match="--omni-admin-port"):
                await head.ends()


async def test_a_signal_lets_requests_finish_and_a_second_one_does_not(start: Any) -> None:
    async with start() as head:
        await head.serves()
        running = head.ask(max_tokens=1)
        request_id = await head.requested()
        send(signal.SIGTERM)
        head.fleet.say(request_id, 3, finish=FinishReason.LENGTH)
        assert (await running).status_code == 200
        await head.ends()
    async with start() as head:
        await head.serves()
        running = head.ask()
        link, engine_id = head.fleet.run_of(await head.requested())
        send(signal.SIGTERM)
        send(signal.SIGINT)
        await head.ends()
        assert link.aborted == [engine_id]
        with pytest.raises(httpx.TransportError):
            await running


@pytest.mark.parametrize("fails", [False, True])
async def test_a_signal_while_engines_end_neither_kills_it_nor_waits_nor_hurries(
    start: Any, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async with start() as head:
        await head.serves()
        head.fleet.may_close.clear()
        if fails:
            head.fleet.link.close()
        else:
            send(signal.SIGTERM)
        await eventually(lambda: head.fleet.closed_after, "the end of engines")
        # Else it would kill this process.
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        send(signal.SIGTERM)
        await eventually(lambda: "SIGTERM: engines are ending" in caplog.text, "its message", PATIENCE_S)
        head.fleet.may_close.set()
        with pytest.raises(OmniError, match="has failed") if fails else nullcontext():
            await head.ends()
        assert (head.fleet.waits, head.fleet.closed_after) == ([] if fails else [10], [None])
        assert "at once" not in caplog.text


async def test_a_signal_after_a_failure_hurries_and_does_not_wait_for_requests(
    start: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    closing, may_close = asyncio.Event(), asyncio.Event()
    close = AdminServer.close

    async def slow_close(server: AdminServer) -> None:
        closing.set()
        await may_close.wait()
        await close(server)

    monkeypatch.setattr(AdminServer, "close", slow_close)
    async with start() as head:
        await head.serves()
        head.fleet.link.close()
        await closing.wait()
        send(signal.SIGTERM)
        await eventually(lambda: "SIGTERM" in caplog.text or head.fleet.waits, "the signal")
        may_close.set()
        with pytest.raises(OmniError, match="has failed"):
            await head.ends()
        assert (head.fleet.waits, head.fleet.closed_after) == ([], [0.0])


async def test_a_replica_that_has_not_started_yet_takes_no_metrics_of_others(start: Any) -> None:
    admin_port = free_port()
    fleet = StartedFleet()
    # The other one is tried again.
    fleet.engines = [[READY]]
    async with start(fleet=fleet, admin_port=admin_port) as head, httpx.AsyncClient() as operator:
        await head.serves()
        metrics = (await operator.get(f"http://{HERE}:{admin_port}/metrics")).text
        assert 'vllm:num_requests_running{engine="1"' in metrics


async def test_a_drained_head_refuses_new_requests(start: Any) -> None:
    async with start() as head:
        await head.serves()
        head.server.drain.begin()
        refused = await head.ask()
        assert refused.status_code == 503
        assert "drain" in refused.json()["error"]["message"]
        assert head.fleet.orchestrator.metrics.requests_failed_before_accept == 1
