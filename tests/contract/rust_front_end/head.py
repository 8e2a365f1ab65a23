"""vLLM's Rust front end itself, before a fleet whose replicas the test plays."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from vllm import envs
from vllm.entrypoints.launchers.launcher import create_server_socket, create_server_unix_socket
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, FinishReason

from tests.fakes.conditions import eventually
from vllm_omni_plugin.integration.rust_front_end.process import ListeningSockets, RustFrontEnd
from vllm_omni_plugin.vllm_api.versions.serve_arguments import make_arg_parser

from .played import PATIENCE_S, READY, RustFleet

HERE = "127.0.0.1"
MODEL = "tiny"


class Head:
    """A started front end and its clients.

    Attributes:
        client: for HTTP.
        processes: ids of all processes that were started, in this order.
        running: ends when the front end has been stopped, or cannot be started.
    """

    def __init__(
        self, fleet: RustFleet, front_end: RustFrontEnd, client: httpx.AsyncClient, processes: list[int]
    ) -> None:
        self.fleet = fleet
        self.front_end = front_end
        self.client = client
        self.processes = processes
        self.running: asyncio.Task[None]

    @property
    def serving(self) -> int:
        """The process that serves, or is about to."""
        process = self.front_end.serving
        assert process is not None
        return process.pid

    async def ask(self, **body: Any) -> httpx.Response:
        """Ask for a completion."""
        return await self.client.post("/v1/completions", json={"model": MODEL, "prompt": "red", **body})

    def ask_later(self, **body: Any) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(self.ask(**body))

    async def requested(self, count: int = 1) -> list[str]:
        """The ids of the unfinished requests, when there are so many."""
        states = self.fleet.orchestrator.request_states
        await eventually(lambda: len(states) == count, f"{count} requests")
        return list(states)

    async def is_healthy(self) -> bool:
        return (await self.client.get("/health")).status_code == 200

    async def has_standby(self, started: int) -> None:
        await eventually(lambda: len(self.processes) == started, f"process {started} of the front end")


@asynccontextmanager
async def started_head(
    model: Path,
    *arguments: str,
    fleet: RustFleet | None = None,
    binary: str | None = None,
    probe_timeout: float = PATIENCE_S,
    grpc_port: int | None = None,
    ready_response: bytes = READY,
) -> AsyncIterator[Head]:
    """A head that serves, with these arguments of `vllm serve`; nothing of it may be left when it has been stopped."""
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(
        [str(model), "--served-model-name", MODEL, "--shutdown-timeout", "20", *arguments]
    )
    args.model, args.host = args.model_tag, HERE
    http = create_server_unix_socket(args.uds) if args.uds else create_server_socket((HERE, 0), reuse_port=False)
    grpc = None if grpc_port is None else create_server_socket((HERE, grpc_port), reuse_port=False)
    listening = ListeningSockets(http, grpc)
    transport = httpx.AsyncHTTPTransport(uds=args.uds, verify=False)
    scheme, port = "https" if args.ssl_certfile else "http", 0 if args.uds else http.getsockname()[1]
    async with (
        fleet or RustFleet(replicas=2) as fleet,
        httpx.AsyncClient(base_url=f"{scheme}://{HERE}:{port}", transport=transport, timeout=PATIENCE_S) as client,
    ):
        processes: list[int] = []
        program = binary or envs.VLLM_RUST_FRONTEND_PATH
        assert program is not None
        front_end = RustFrontEnd(
            program,
            args,
            listening,
            fleet.link,
            watch=processes.append,
            probe_interval=0.02,
            probe_timeout=probe_timeout,
        )
        fleet.on_adapters = front_end.adapters_changed
        head = Head(fleet, front_end, client, processes)
        preparing = asyncio.create_task(front_end.prepare())
        await eventually(lambda: processes, "the first process")
        preparing.cancel()
        await asyncio.wait((preparing,))
        http.listen()
        head.running = asyncio.create_task(front_end.run(ready_response))
        try:
            await eventually(lambda: len(processes) == 2 or head.running.done(), "a standby")
            if head.running.done():
                head.running.result()
            yield head
        finally:
            front_end.stop()
            front_end.kill()
            await asyncio.wait((head.running,))
            await front_end.close()
            listening.close()
            await eventually(lambda: not any(map(is_running, processes)), "the end of all processes")


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def answers_itself(fleet: RustFleet, tokens: int = 3) -> None:
    """Let the replicas answer each request with so many tokens, one by one."""
    for link in fleet.links.values():
        link.on_request = lambda link, request: _answer(link, request.request_id, tokens)


def _answer(link: Any, engine_id: str, left: int) -> None:
    if engine_id in link.aborted:
        return
    reason = FinishReason.LENGTH if left == 1 else None
    link.say_outputs(outputs=[EngineCoreOutput(engine_id, [3 + left % 3], finish_reason=reason)])
    if left > 1:
        asyncio.get_running_loop().call_soon(_answer, link, engine_id, left - 1)
