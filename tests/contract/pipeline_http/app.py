"""vLLM's own HTTP handlers in front of a pipeline whose stages the test plays; no engine."""

import asyncio
import json
import math
import runpy
import time
import warnings
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from fastapi import FastAPI
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.openai.chat_completion.api_router import attach_router as attach_chat
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.api_router import attach_router as attach_completion
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.models.protocol import BaseModelPath
from vllm.entrypoints.openai.models.serving import OpenAIServingModels
from vllm.entrypoints.serve.exception_handling.register import init_exception_handler
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.renderers import renderer_from_config
from vllm.renderers.online_renderer import OnlineRenderer
from vllm.sampling_params import RequestOutputKind

from tests.admin.asgi import Client
from vllm_omni_plugin.admin.http_admission import AdmissionMiddleware, HttpAdmission, current_response
from vllm_omni_plugin.integration.core_client.pipeline_calls import register_request
from vllm_omni_plugin.integration.http.app import serve_pipeline
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCall, PipelineCallEnded, StageEvent
from vllm_omni_plugin.pipeline import Modality, Pipeline, Stage, StageOutput

TINY_MODEL = Path(__file__).parents[3] / "examples" / "cpu" / "tiny_model.py"
MODEL = "tiny"

Step = tuple[str, str | None] | StageEvent | PipelineCallEnded | asyncio.Event
"""What happens to a request: the front stage says something, and why it ends; a stage puts something out; the request
waits for the test."""


@dataclass
class Played:
    """AsyncLLM, as far as vLLM's handlers know it, and the stages behind it.

    Attributes:
        steps: what happens to each request, whoever listens.
        calls: of the requests, None for a plain one.
        prompts: of the requests.
        finished: requests to which everything has happened.
        aborted: what was aborted in all stages.
        given_up: requests whose answer nobody reads any more.
    """

    config: Any
    renderer: Any
    steps: tuple[Step, ...]
    calls: list[PipelineCall | None] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    aborted: list[tuple[str, ...]] = field(default_factory=list)
    given_up: list[str] = field(default_factory=list)
    input_processor: Any = None
    errored: bool = False

    @property
    def model_config(self) -> Any:
        return self.config.model_config

    @property
    def vllm_config(self) -> Any:
        return self.config

    def check_admission(self, *_: Any) -> None: ...

    async def generate(
        self, prompt: Any, params: Any, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        call, answer = register_request(request_id), current_response()
        assert answer is not None
        answer.add_request(request_id, 0.0)
        self.calls.append(call)
        self.prompts.append(prompt)
        deltas: asyncio.Queue[tuple[str, str | None]] = asyncio.Queue()
        playing = asyncio.create_task(self._play(request_id, call, deltas))
        said, finish = "", None
        try:
            while finish is None:
                text, finish = await deltas.get()
                said += text
                if params.output_kind is RequestOutputKind.DELTA:
                    yield _output(request_id, text, finish)
                elif finish is not None:
                    yield _output(request_id, said, finish)
        except (asyncio.CancelledError, GeneratorExit):
            playing.cancel()
            self.given_up.append(request_id)
            raise

    async def _play(self, request_id: str, call: PipelineCall | None, deltas: Any) -> None:
        for step in self.steps:
            match step:
                case (_, _):
                    deltas.put_nowait(step)
                case asyncio.Event():
                    await step.wait()
                case _:
                    assert call is not None
                    # On another thread, as always.
                    await asyncio.to_thread(call.put, step)
        self.finished.append(request_id)


def _output(request_id: str, text: str, finish: str | None) -> RequestOutput:
    answer = CompletionOutput(0, text, [1] * bool(text), None, None, finish_reason=finish)
    return RequestOutput(request_id, None, [1, 2, 3], None, [answer], finish is not None)


@dataclass(frozen=True)
class Model:
    """What of vLLM takes a while to make, once for all tests."""

    config: Any
    renderer: Any
    online: Any


def make_model(folder: Path, max_model_len: int = 64) -> Model:
    path = runpy.run_path(str(TINY_MODEL))["make_tiny_model"](folder / "tiny")
    with warnings.catch_warnings():
        # Some of vLLM's imports warn.
        warnings.simplefilter("ignore")
        config = EngineArgs(model=str(path), max_model_len=max_model_len).create_engine_config()
        renderer = renderer_from_config(config)
        online = OnlineRenderer(
            config.model_config,
            renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
        )
    return Model(config, renderer, online)


class PipelineApp:
    """The application, and the clients that the test plays."""

    def __init__(self, model: Model, pipeline: Pipeline | None, *steps: Step) -> None:
        self.engine = Played(model.config, model.renderer, steps)
        self.app = FastAPI()
        self.app.state.args = SimpleNamespace(log_error_stack=False, sse_keep_alive_interval=0)
        attach_chat(self.app)
        attach_completion(self.app)
        init_exception_handler(self.app)
        paths = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/audio/speech"})
        self.app.add_middleware(AdmissionMiddleware, paths=paths, has_key=lambda _: True)
        self.app.state.omni_admission = HttpAdmission(
            lambda *_: None, lambda _: True, list, (), time.monotonic, lambda _: math.inf
        )
        models = OpenAIServingModels(self.engine, [BaseModelPath(MODEL, MODEL)])
        shared: dict[str, Any] = {"online_renderer": model.online, "request_logger": None}
        self.app.state.openai_serving_completion = OpenAIServingCompletion(self.engine, models, **shared)
        self.app.state.openai_serving_chat = OpenAIServingChat(
            self.engine, models, "assistant", chat_template=None, chat_template_content_format="auto", **shared
        )
        if pipeline is not None:
            serve_pipeline(self.app, pipeline, lambda ids: self.engine.aborted.append(tuple(ids)))

    def post(self, path: str, **body: Any) -> Client:
        headers = [(b"content-type", b"application/json")]
        scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "query_string": b""}
        client = Client(self.app, {**scope, "http_version": "1.1", "scheme": "http", "server": ("test", 80)})
        client.upload(json.dumps({"model": MODEL, **body}).encode())
        return client

    def chat(self, **body: Any) -> Client:
        return self.post("/v1/chat/completions", messages=[{"role": "user", "content": "Hello"}], **body)

    async def answer(self, client: Client, status: int = 200) -> Any:
        assert await client.status() == status, client.body
        return json.loads(client.body)


def events(body: bytes) -> list[dict[str, Any]]:
    *parts, done, rest = body.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def samples(*values: float, stage: str = "vocoder", last: bool = False, **metadata: Any) -> StageEvent:
    """Audio of a stage."""
    return StageEvent(stage, StageOutput((), "", torch.tensor(values), metadata, "stop" if last else None))


def spoken(text: str, stage: str = "thinker", last: bool = False) -> StageEvent:
    """Text of a stage."""
    return StageEvent(stage, StageOutput((), text, finish_reason="stop" if last else None))


def classified() -> Pipeline:
    """A writer, and a guard that scores what it writes."""
    writer = Stage(0, "writer", "vllm", Modality.TEXT, model="writer", final=True)
    guard = Stage(1, "guard", "vllm", Modality.SCORES, model="guard", inputs=("writer",), final=True)
    return Pipeline((writer, guard))
