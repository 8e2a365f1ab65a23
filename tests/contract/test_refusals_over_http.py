"""Requests that are refused while they wait, through all of vLLM's handlers: its HTTP server without engines."""

import asyncio
import logging
import re
import runpy
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starlette.types import Message

from tests.contract.http_server import HttpServer, http_server
from tests.contract.pipeline_http.app import TINY_MODEL, events
from tests.fakes.conditions import eventually
from tests.fakes.links import FakeLink
from tests.fakes.played_fleet import PlayedFleet
from vllm_omni_plugin.admission import AdmissionConfig
from vllm_omni_plugin.balancing import RandomBalancer
from vllm_omni_plugin.errors import NoReplicaError, RequestRefusedError
from vllm_omni_plugin.orchestrator import Orchestrator, StagePool
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadRules
from vllm_omni_plugin.orchestrator.multi_stage.input_builder import StageInputBuilder
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolTraits
from vllm_omni_plugin.pipeline import Modality, Pipeline, Stage
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import ready_response
from vllm_omni_plugin.vllm_api.vllm_stages.stage_requests import VllmStageApi

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    # vLLM reads fields of its own that it has deprecated.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

REFUSED = RequestRefusedError(429, "deadline", "The request has waited too long.", 9)
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
GENERATING: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hello", "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "Hello", "max_output_tokens": 4},
    "/v1/messages": CHAT,
    "/inference/v1/generate": {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4}},
}
POOLING: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "Hello"},
    "/v2/embed": {"texts": ["Hello"], "embedding_types": ["float"]},
    "/pooling": {"input": "Hello"},
    "/score": {"text_1": "Hello", "text_2": "there"},
    "/rerank": {"query": "Hello", "documents": ["there"]},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = runpy.run_path(str(TINY_MODEL))["make_tiny_model"](tmp_path_factory.mktemp("model") / "tiny")
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def generating(model: Path) -> AsyncIterator[HttpServer]:
    with pytest.MonkeyPatch.context() as patch:
        async with http_server(model, patch, ("generate",), "--enable-scale-out") as server:
            yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pooling(model: Path) -> AsyncIterator[HttpServer]:
    arguments = ("--runner", "pooling", "--convert", "embed")
    with pytest.MonkeyPatch.context() as patch:
        async with http_server(model, patch, ("embed",), *arguments) as server:
            yield server


async def is_refused(server: HttpServer, path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    """Send a request, whose first part the orchestrator refuses, and look at what its client gets, without an error."""
    await server.forget()
    async with asyncio.timeout(20):
        client = server.post(path, **body)
        message = await server.submitted()
        assert message.terms is not None
        assert message.terms.timeout_s == pytest.approx(60, abs=20)
        assert client.sent == []
        server.fail(message, REFUSED)
        assert await client.status() == 429
    assert client.headers["retry-after"] == "9"
    assert client.headers["content-type"] == "application/json"
    assert client.error == {"message": str(REFUSED), "type": "rate_limit_exceeded", "param": None, "code": 429}
    assert len(client.sent) == 2
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", GENERATING)
async def test_an_answer_whose_request_is_refused_has_the_true_status(
    generating: HttpServer, path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    await is_refused(generating, path, {**GENERATING[path], "stream": stream}, caplog)


@pytest.mark.parametrize("path", POOLING)
async def test_a_pooling_call_that_is_refused_has_the_true_status(
    pooling: HttpServer, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    await is_refused(pooling, path, POOLING[path], caplog)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("several", [{"n": 3}, {"prompt": ["Hello", "there", "you"]}], ids=["n", "prompts"])
async def test_an_answer_of_several_requests_ends_with_all_of_them_when_one_is_refused(
    generating: HttpServer, several: dict[str, Any], stream: bool
) -> None:
    async with asyncio.timeout(20):
        client = generating.post("/v1/completions", **{"prompt": "Hello", **several, "stream": stream})
        first, second, third = [await generating.submitted() for _ in range(3)]
        generating.fail(second, REFUSED)
        assert await client.status() == 429
        aborted = set(await generating.aborted())
        while len(aborted) < 3:
            aborted |= set(await generating.aborted())
    assert aborted == {message.request.request_id for message in (first, second, third)}


async def test_a_stream_whose_client_leaves_while_it_waits_is_aborted(generating: HttpServer) -> None:
    async with asyncio.timeout(20):
        client = generating.post("/v1/chat/completions", **CHAT, stream=True)
        message = await generating.submitted()
        client.disconnect()
        assert await generating.aborted() == (message.request.request_id,)
        await client.request
    assert [sent["type"] for sent in client.sent] == ["http.response.start"]


async def test_other_failures_of_a_stream_are_events_as_before(generating: HttpServer) -> None:
    async with asyncio.timeout(20):
        client = generating.post("/v1/chat/completions", **CHAT, stream=True)
        generating.fail(await generating.submitted(), NoReplicaError("No replica."))
        assert await client.status() == 200
    assert [event["error"]["message"] for event in events(client.body)] == ["No replica."]


def alike(messages: list[Message]) -> list[Message]:
    """The messages without the ids and times that vLLM draws for each answer."""
    drawn = re.compile(rb'"(created|created_at|completed_at)":\d+(\.\d+)?|(?<=_)[0-9a-f]{16,32}')
    return [
        {**message, "body": drawn.sub(b"", message["body"])} if "body" in message else message for message in messages
    ]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", GENERATING)
async def test_requests_that_are_not_refused_have_the_same_bytes_as_without_admission(
    generating: HttpServer, path: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def answer() -> list[Message]:
        client = generating.post(path, **GENERATING[path], stream=stream)
        message = await generating.submitted()
        before = len(client.sent)
        generating.answer(message, 40, 41, ends=False)
        if stream:
            # As many events as outputs, whatever the load.
            await client.sent_so_far(before + 1)
        generating.answer(message, 42, 43)
        assert await client.status() == 200
        return alike(client.sent)

    async with asyncio.timeout(20):
        with_admission = await answer()
        monkeypatch.setattr(generating.app.state, "omni_admission", None)
        assert await answer() == with_admission


PIPELINE = Pipeline(
    (
        Stage(0, "prefill", "vllm", Modality.KV_CACHE, model="m"),
        Stage(1, "decode", "vllm", Modality.TEXT, model="m", inputs=("prefill",), final=True),
    )
)
PATIENCE_S = 0.2
"""Seconds that a client waits whose request cannot start."""


class SilentLink(FakeLink):
    """An engine that gets requests and says nothing.

    Attributes:
        got: messages that it got.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.got = 0

    def send(self, frames: Any) -> None:
        self.got += 1


class Fleet(PlayedFleet):
    """A replica of each stage, which get one request to begin and one behind it.

    Attributes:
        links: to the engines, by stage.
    """

    def __init__(self, config: Any) -> None:
        apis = [VllmStageApi(config, config, stage) for stage in PIPELINE.stages]
        pools = [
            StagePool(stage.id, RandomBalancer(), traits=PoolTraits(waits_for_room=True)) for stage in PIPELINE.stages
        ]
        input_builder = StageInputBuilder(PIPELINE, apis, str)
        self.orchestrator = Orchestrator(
            pools, apis, HeadRules(0, admission=AdmissionConfig()), time.monotonic, input_builder=input_builder
        )
        self.links = [SilentLink(stage.name) for stage in PIPELINE.stages]
        for pool, link, api in zip(pools, self.links, apis, strict=True):
            self.serve(pool.add(), link, api, ready_response(0, num_gpu_blocks=100, block_size=16))


async def test_a_request_that_does_not_start_in_time_gets_503_and_costs_no_prefill(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets: list[Fleet] = []

    def orchestrator_of(config: Any) -> Orchestrator:
        fleets.append(Fleet(config))
        return fleets[0].orchestrator

    async with http_server(model, monkeypatch, ("generate",), orchestrator_of=orchestrator_of) as server, fleets[0]:
        body = {"prompt": "red green blue", "max_tokens": 4}
        begun = [server.post("/v1/completions", **body) for _ in range(2)]
        prefill, decode = fleets[0].links
        await eventually(lambda: prefill.got == len(begun), "the prefills of those before it")
        late = server.post("/v1/completions", PATIENCE_S, **body)
        assert await late.status() == 503
        assert late.error["message"] == "No engine could begin the request by its deadline."
        assert int(late.headers["retry-after"]) >= 1
        assert (prefill.got, decode.got) == (len(begun), 0)
        for client in begun:
            client.disconnect()
            await client.request
