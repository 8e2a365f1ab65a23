"""vLLM's whole HTTP server in this process, with a fleet behind it whose orchestrator the test plays."""

import json
import time
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from vllm import plugins
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.executor import Executor

from tests.admin.asgi import Client
from tests.fakes.idle_fleet import IdleFleet
from vllm_omni_plugin.admission import AdmissionConfig
from vllm_omni_plugin.balancing import RandomBalancer
from vllm_omni_plugin.config import OmniConfig
from vllm_omni_plugin.integration.core_client.fleet_client import FleetClient
from vllm_omni_plugin.integration.http.app import patch_app
from vllm_omni_plugin.integration.options.additional_config import LOCAL_ADMIN_KEY, store_options
from vllm_omni_plugin.orchestrator import Orchestrator, StagePool
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadRules
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    AbortRequests,
    RequestFailed,
    RequestMessage,
    SubmitRequest,
)
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.versions.serve_arguments import make_arg_parser

MODEL = "tiny"


class HttpServer:
    """The application, the clients and the orchestrator, both of which the test plays.

    Attributes:
        app: vLLM's, with all that we add.
        orchestrator: what it hands requests to. It does not run.
    """

    def __init__(self, app: FastAPI, orchestrator: Orchestrator) -> None:
        self.app = app
        self.orchestrator = orchestrator

    def post(self, path: str, patience: float = 60, **body: Any) -> Client:
        """Send a request that may be refused while it waits, and is after so many seconds."""
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"same")]
        headers.append((b"x-request-timeout", b"%g" % patience))
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        more = {"http_version": "1.1", "scheme": "http", "server": ("test", 80), "client": ("127.0.0.1", 40000)}
        client = Client(self.app, {**scope, **more})
        client.upload(json.dumps({"model": MODEL, **body}).encode())
        return client

    async def forget(self) -> None:
        """What has been said to the orchestrator so far does not count."""
        if len(self.orchestrator.front_end.request_async_queue):
            await self.orchestrator.front_end.request_async_queue.get_batch()

    async def told(self, kind: type[RequestMessage]) -> Any:
        """The next message of this kind to the orchestrator; what comes before it is dropped."""
        queue = self.orchestrator.front_end.request_async_queue
        while True:
            batch = await queue.get_batch()
            for number, message in enumerate(batch):
                if isinstance(message, kind):
                    for later in batch[number + 1 :]:
                        queue.put(later)
                    return message

    async def submitted(self) -> SubmitRequest:
        """The next request that the orchestrator gets."""
        message: SubmitRequest = await self.told(SubmitRequest)
        return message

    async def aborted(self) -> tuple[str, ...]:
        """The next requests whose abort it is told."""
        message: AbortRequests = await self.told(AbortRequests)
        return message.request_ids

    def fail(self, message: SubmitRequest, error: Exception) -> None:
        """The orchestrator ends a request with an error."""
        self.orchestrator.front_end.output_async_queue.put(RequestFailed(message.request.request_id, error))

    def answer(self, message: SubmitRequest, *tokens: int, ends: bool = True) -> None:
        """A replica has computed tokens for a request."""
        reason = FinishReason.LENGTH if ends else None
        output = EngineCoreOutput(message.request.request_id, list(tokens), finish_reason=reason)
        outputs = EngineCoreOutputs(outputs=[output], timestamp=time.monotonic())
        self.orchestrator.front_end.output_async_queue.put(outputs)


class _Client(FleetClient):
    tasks: tuple[str, ...] = ()

    async def get_supported_tasks_async(self) -> Any:
        return self.tasks


def one_stage(config: Any) -> Orchestrator:
    """An orchestrator of one stage without replicas, whatever the model."""
    return Orchestrator(
        [StagePool(0, RandomBalancer())], [EngineApi()], HeadRules(0, admission=AdmissionConfig()), time.monotonic
    )


@asynccontextmanager
async def http_server(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    tasks: tuple[str, ...],
    *arguments: str,
    orchestrator_of: Callable[[Any], Orchestrator] = one_stage,
) -> AsyncIterator[HttpServer]:
    """vLLM's server on the loop that runs, until the context ends.

    Args:
        model: its folder.
        monkeypatch: undoes what changes vLLM.
        tasks: what the model can do.
        arguments: more of its command line.
        orchestrator_of: makes the orchestrator for vLLM's configuration of the model.
    """
    with warnings.catch_warnings():
        # Some of vLLM's imports warn.
        warnings.simplefilter("ignore")
        monkeypatch.setattr(plugins, "load_endpoint_plugins", plugins.load_endpoint_plugins)
        patch_app()
        line = [str(model), "--served-model-name", MODEL, "--max-model-len", "64", *arguments]
        args = make_arg_parser(FlexibleArgumentParser()).parse_args(line)
        args.model = args.model_tag
        args.omni_admin_key_file, args.omni_admin_loopback = None, True
        setattr(args, LOCAL_ADMIN_KEY, "a key that nobody needs")
        engine_args = AsyncEngineArgs.from_cli_args(args)
        store_options(engine_args, OmniConfig(tenant_header="X-Tenant-ID"))
        config = engine_args.create_engine_config()
        orchestrator = orchestrator_of(config)
        client = _Client(IdleFleet(orchestrator), config, [])
        client.tasks = tasks
        monkeypatch.setattr(EngineCoreClient, "make_async_mp_client", staticmethod(lambda *_, **__: client))
        server = AsyncLLM(config, Executor.get_class(config), log_stats=False)
        client.bind(server.output_processor, server.logger_manager)
        app = build_app(args, tasks, config.model_config)
        await init_app_state(server, app.state, args, tasks)
        # No replica serves, and requests shall reach the orchestrator all the same.
        app.state.omni_hold = None
        # As with a plan that bounds the queue.
        app.state.omni_admission = replace(app.state.omni_admission, may_refuse=lambda _: True)
    try:
        yield HttpServer(app, orchestrator)
    finally:
        server.shutdown()
