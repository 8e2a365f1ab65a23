"""`POST /v1/audio/speech` through vLLM's own handler of completions."""

import asyncio
import io
import json
import wave
from base64 import b64decode
from typing import Any

import pytest

from tests.admin.asgi import Client
from tests.contract.pipeline_http.app import Model, PipelineApp, classified, samples, spoken
from tests.fakes.conditions import eventually
from vllm_omni_plugin.errors import StageError, StageInputError
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCallEnded
from vllm_omni_plugin.pipeline import Pipeline

ENDED = PipelineCallEnded(None)
UNKNOWN = 0xFFFF_FFFF


def speak(app: PipelineApp, **body: Any) -> Client:
    return app.post("/v1/audio/speech", **{"input": "Hello.", **body})


async def test_a_text_is_spoken(model: Model, speech: Pipeline) -> None:
    app = PipelineApp(
        model, speech, spoken("Hello."), samples(0.5, 0.25, last=True, sample_rate=16000), ("", "stop"), ENDED
    )
    client = speak(
        app, voice="ann", instructions="whisper", omni={"params": {"tone": "low"}, "sampling": {"talker": {"seed": 1}}}
    )
    assert await client.status() == 200
    assert client.headers["content-type"] == "audio/wav"
    with wave.open(io.BytesIO(client.body)) as file:
        assert (file.getframerate(), file.getnframes(), file.readframes(2)) == (16000, 2, b"\x00\x40\x00\x20")
    (call,) = app.engine.calls
    assert call is not None
    assert call.modalities == ("audio",)
    assert call.params == {"voice": "ann", "instructions": "whisper", "tone": "low"}
    assert call.sampling == {"talker": {"seed": 1}}
    assert app.engine.prompts[0]["prompt_token_ids"] == model.renderer.tokenizer("Hello.").input_ids
    assert app.engine.aborted == []


async def test_a_streamed_file_of_unknown_length_is_read_to_its_end(model: Model, speech: Pipeline) -> None:
    rest = asyncio.Event()
    app = PipelineApp(model, speech, samples(0.5), rest, samples(0.25, last=True), ("", "stop"), ENDED)
    client = speak(app, stream_format="audio")
    await eventually(lambda: len(client.body) > 44, "the first audio")
    assert int.from_bytes(client.body[40:44], "little") == UNKNOWN
    rest.set()
    assert await client.status() == 200
    with wave.open(io.BytesIO(client.body)) as file:
        assert file.readframes(100) == b"\x00\x40\x00\x20"


async def test_speech_as_events(model: Model, speech: Pipeline) -> None:
    app = PipelineApp(model, speech, samples(0.5), samples(0.25, last=True), ("", "stop"), ENDED)
    client = speak(app, response_format="pcm", stream_format="sse")
    assert await client.status() == 200
    *deltas, done = [json.loads(part.removeprefix("data: ")) for part in client.body.decode().strip().split("\n\n")]
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert b"".join(b64decode(delta["audio"]) for delta in deltas) == b"\x00\x40\x00\x20"
    assert done == {"type": "speech.audio.done", "usage": {"input_tokens": 3, "output_tokens": 0, "total_tokens": 3}}


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        ({"response_format": "mp3"}, 400, "'wav' or 'pcm'"),
        ({"stream_format": "file"}, 400, "'audio' or 'sse'"),
        ({"speed": 2}, 400, "speed"),
        ({"input": ""}, 400, "input"),
        ({"emotion": "joy"}, 400, "emotion"),
        ({"omni": {"outputs": ["thinker"]}}, 400, "outputs"),
        ({"omni": {"sampling": {"talkr": {}}}}, 400, "'talkr' runs for this request (did you mean 'talker'?)"),
        ({"input": "one two three " * 100}, 400, "64"),
        ({"model": "other"}, 404, '"param": "model"'),
    ],
)
async def test_an_invalid_request_is_refused(
    model: Model, speech: Pipeline, body: dict[str, Any], status: int, message: str
) -> None:
    client = speak(PipelineApp(model, speech, ENDED), **body)
    assert await client.status() == status
    assert message in json.dumps(client.error, ensure_ascii=False)


async def test_a_pipeline_without_audio_does_not_speak(model: Model, speech: Pipeline) -> None:
    mute = PipelineApp(model, classified(), ENDED)
    client = speak(mute, emotion="joy")
    assert await client.status() == 404
    offered = ["/v1/audio/speech" in app.app.openapi()["paths"] for app in (mute, PipelineApp(model, speech, ENDED))]
    assert offered == [False, True]


@pytest.mark.parametrize(("error", "status"), [(StageInputError("Stage 'talker': no"), 400), (StageError("no"), 500)])
async def test_a_stage_that_fails_before_the_first_audio_gives_a_status(
    model: Model, speech: Pipeline, error: Exception, status: int
) -> None:
    client = speak(PipelineApp(model, speech, PipelineCallEnded(error)))
    assert await client.status() == status
    assert client.error["message"] == str(error)


async def test_a_stage_that_fails_later_cuts_the_file_or_ends_the_events_with_its_error(
    model: Model, speech: Pipeline
) -> None:
    app = PipelineApp(model, speech, samples(0.5), PipelineCallEnded(StageError("Stage 'vocoder': it broke")))
    client = speak(app, stream_format="audio")
    with pytest.raises(StageError):
        await client.status()
    assert client.sent[-1]["more_body"]
    client = speak(app, stream_format="sse")
    assert await client.status() == 200
    last = json.loads(client.body.decode().strip().split("\n\n")[-1].removeprefix("data: "))
    assert last["error"]["message"] == "Stage 'vocoder': it broke"


@pytest.mark.parametrize("heard", [False, True])
async def test_a_client_that_leaves_ends_all_stages(model: Model, speech: Pipeline, heard: bool) -> None:
    app = PipelineApp(model, speech, samples(0.5)) if heard else PipelineApp(model, speech)
    client = speak(app, stream_format="audio" if heard else None)
    await eventually(lambda: bool(app.engine.finished) and (not heard or len(client.sent) > 1), "the request")
    client.disconnect()
    await eventually(lambda: bool(app.engine.given_up), "the end of the request")
    assert app.engine.aborted == [tuple(app.engine.given_up)]
