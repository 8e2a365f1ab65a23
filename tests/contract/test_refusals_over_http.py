"""Requests that are refused while they wait, through all of vLLM's handlers: its HTTP server without engines."""

import asyncio
import logging
import re
import runpy
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from starlette.types import Message

from tests.contract.http_server import HttpServer, http_server
from tests.contract.pipeline_http.app import TINY_MODEL, events
from vllm_omni_plugin.errors import NoReplicaError, RequestRefusedError

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
