"""Streamed answers of a pipeline: audio between vLLM's own events."""

from base64 import b64decode
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from tests.contract.pipeline_http.app import MODEL, Model, PipelineApp, Step, events, samples, spoken
from tests.fakes.conditions import eventually
from vllm_omni_plugin.errors import RequestRefusedError, StageInputError
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCallEnded
from vllm_omni_plugin.pipeline import Pipeline

# vLLM reads a field of its own that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning")

BOTH: dict[str, Any] = {"modalities": ["text", "audio"], "stream": True}
HALF = (0.5, 0.5, 0.5)
"""AEAAQABA in Base64."""
ENDED = PipelineCallEnded(None, {"talker": {"run": 0.5}})


def deltas(body: bytes) -> list[dict[str, Any]]:
    return [event["choices"][0]["delta"] for event in events(body) if event["choices"]]


def audio(body: bytes) -> list[dict[str, Any]]:
    return [delta["audio"] for delta in deltas(body) if "audio" in delta]


def finish_reasons(body: bytes) -> list[str | None]:
    return [event["choices"][0]["finish_reason"] if event["choices"] else "" for event in events(body)]


async def stream(app: PipelineApp, **body: Any) -> bytes:
    client = app.chat(**body)
    assert await client.status() == 200
    return client.body


async def test_audio_that_comes_after_the_text_comes_before_its_end(model: Model, speech: Pipeline) -> None:
    steps: tuple[Step, ...] = (
        ("Hel", None),
        ("lo.", "stop"),
        spoken("Hello."),
        samples(*HALF),
        samples(*HALF, last=True),
    )
    app = PipelineApp(model, speech, *steps, ENDED)
    body = await stream(app, **BOTH, stream_options={"include_usage": True})
    assert [delta["content"] for delta in deltas(body) if delta.get("content")] == ["Hel", "lo."]
    first, *rest, last = audio(body)
    assert first.pop("id").startswith("audio_")
    assert [first, *rest] == [{"transcript": "Hello."}, {"data": "AEAAQABA"}, {"data": "AEAAQABA"}]
    assert last == {"expires_at": events(body)[0]["created"]}
    assert finish_reasons(body)[-2:] == ["stop", ""]
    assert set(finish_reasons(body)[:-2]) == {None}
    assert events(body)[-1]["usage"]["prompt_tokens"] == 3
    assert len({(event["id"], event["created"], event["model"], event["object"]) for event in events(body)}) == 1
    assert app.engine.aborted == []


async def test_requested_outputs_of_other_stages_come_last(model: Model, speech: Pipeline) -> None:
    app = PipelineApp(model, speech, spoken("Hello."), ("Hello.", "stop"), ENDED)
    body = await stream(app, stream=True, omni={"outputs": ["thinker"], "timings": True})
    assert events(body)[-1]["omni"] == {"outputs": {"thinker": {"text": "Hello."}}, "timings": {"talker": {"run": 0.5}}}
    assert events(body)[-2]["choices"][0]["finish_reason"] == "stop"


async def test_n_answers_with_parameters_for_a_stage_stream_as_vllm_streams_them(
    model: Model, speech: Pipeline
) -> None:
    app = PipelineApp(model, speech, ("Hello.", "stop"), PipelineCallEnded(None))
    client = app.post("/v1/completions", prompt=["a", "b"], stream=True, omni={"params": {"tone": "low"}})
    assert await client.status() == 200
    assert [event["choices"][0]["text"] for event in events(client.body)] == ["Hello.", "Hello."]
    assert [call.params for call in app.engine.calls if call is not None] == [{"tone": "low"}] * 2
    assert app.engine.aborted == []


async def test_a_stage_that_fails_ends_the_stream_with_its_error(model: Model, speech: Pipeline) -> None:
    error = StageInputError("Stage 'talker': the input has 9 tokens")
    app = PipelineApp(model, speech, ("Hel", None), PipelineCallEnded(error))
    body = await stream(app, **BOTH)
    assert events(body)[-1]["error"]["message"] == str(error)
    assert events(body)[-1]["error"]["code"] == 400
    await eventually(lambda: bool(app.engine.given_up), "the end of the text")


async def test_audio_of_a_stream_is_little_endian_pcm(model: Model, speech: Pipeline) -> None:
    app = PipelineApp(model, speech, ("a", "stop"), samples(1.0, -1.0, 2.0, float("nan"), last=True), ENDED)
    data = "".join(part.get("data", "") for part in audio(await stream(app, **BOTH)))
    assert b64decode(data, validate=True) == b"\xff\x7f\x01\x80\xff\x7f\x00\x00"


async def test_openais_own_client_gathers_all_of_it(model: Model, speech: Pipeline) -> None:
    steps: tuple[Step, ...] = (("Hel", None), spoken("Hel"), ("lo.", "stop"), spoken("lo."))
    app = PipelineApp(model, speech, *steps, samples(0.5), samples(0.25), samples(-0.5, 0.25, last=True), ENDED)
    transport = httpx.ASGITransport(app.app)
    async with (
        AsyncOpenAI(
            base_url="http://test/v1", api_key="none", http_client=httpx.AsyncClient(transport=transport)
        ) as client,
        client.chat.completions.stream(
            model=MODEL,
            messages=[{"role": "user", "content": "Hi"}],
            modalities=["text", "audio"],
            audio={"voice": "ann", "format": "pcm16"},
        ) as answer,
    ):
        message = (await answer.get_final_completion()).choices[0].message
    assert message.content == "Hello."
    assert message.audio is not None
    assert message.audio.transcript == "Hello."
    assert message.audio.id.count("audio_") == 1
    assert b64decode(message.audio.data, validate=True) == b"\x00\x40\x00\x20\x00\xc0\x00\x20"


REFUSED = RequestRefusedError(503, "pushed_out", "Others go first.", 4)
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "modalities": ["text", "audio"]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        pytest.param("/v1/chat/completions", CHAT, id="chat"),
        pytest.param("/v1/chat/completions", {**CHAT, "audio": {"format": "pcm16"}, "stream": True}, id="stream"),
        pytest.param("/v1/completions", {"prompt": "Hello", "omni": {"outputs": ["thinker"]}}, id="completion"),
        pytest.param("/v1/audio/speech", {"input": "Hello"}, id="speech"),
        pytest.param("/v1/audio/speech", {"input": "Hello", "stream_format": "sse"}, id="events of speech"),
    ],
)
async def test_a_call_that_is_refused_has_the_true_status(
    model: Model, speech: Pipeline, path: str, body: dict[str, Any]
) -> None:
    app = PipelineApp(model, speech, PipelineCallEnded(REFUSED))
    client = app.post(path, **body)
    assert await client.status() == 503
    assert client.headers["retry-after"] == "4"
    assert client.error == {"message": "Others go first.", "type": "Service Unavailable", "param": None, "code": 503}
