"""Chat completions of a pipeline through vLLM's own handler: whole answers."""

import io
import json
import wave
from base64 import b64decode
from typing import Any

import pytest
import torch

from tests.contract.pipeline_http.app import Model, PipelineApp, Step, classified, events, samples, spoken
from tests.fakes.conditions import eventually
from vllm_omni_plugin.errors import NoReplicaError
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCallEnded, StageEvent
from vllm_omni_plugin.pipeline import Pipeline, StageOutput

# vLLM reads a field of its own that it has deprecated.
pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated:DeprecationWarning")

SPEAKING: tuple[Step, ...] = (
    ("Hel", None),
    spoken("Hel"),
    ("lo.", "stop"),
    spoken("lo.", last=True),
    samples(0.0, 0.5),
    samples(-1.0, last=True),
    PipelineCallEnded(None, {"thinker": {"run": 0.25}}),
)
BOTH = ["text", "audio"]


def message(answer: dict[str, Any]) -> dict[str, Any]:
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop"
    found: dict[str, Any] = choice["message"]
    return found


async def test_audio_alone_has_a_transcript_and_no_content(model: Model, speech: Pipeline) -> None:
    app = PipelineApp(
        model,
        speech,
        spoken("Hi."),
        samples(0.1, sample_rate=8000),
        samples(0.2, last=True, sample_rate=8000),
        ("", "stop"),
        PipelineCallEnded(None),
    )
    said = message(await app.answer(app.chat(modalities=["audio"])))
    assert said["content"] is None
    assert said["audio"]["transcript"] == "Hi."
    with wave.open(io.BytesIO(b64decode(said["audio"]["data"]))) as file:
        assert (file.getframerate(), file.getnframes()) == (8000, 2)
    said = message(await app.answer(app.chat(modalities=["audio"], audio={"format": "pcm16"})))
    assert len(b64decode(said["audio"]["data"])) == 4, "samples without the header of a file"


@pytest.mark.parametrize("asked", [{}, {"modalities": ["text"]}, {"omni": {}}, {"n": 2}])
async def test_text_alone_is_a_plain_request(model: Model, speech: Pipeline, asked: dict[str, Any]) -> None:
    app = PipelineApp(model, speech, ("Hello.", "stop"))
    answer = await app.answer(app.chat(**asked))
    assert answer["choices"][0]["message"]["content"] == "Hello."
    assert answer["choices"][0]["message"]["audio"] is None
    assert app.engine.calls == [None]


async def test_outputs_of_other_stages_and_times_are_returned_on_request(model: Model, speech: Pipeline) -> None:
    talked = StageEvent("talker", StageOutput((7, 8)))
    app = PipelineApp(model, speech, talked, *SPEAKING[:-1], talked, SPEAKING[-1])
    omni = {
        "outputs": ["talker", "thinker", "vocoder"],
        "timings": True,
        "sampling": {"talker": {"seed": 1}},
        "params": {"a": 1},
    }
    answer = await app.answer(app.chat(modalities=BOTH, omni=omni))
    told = answer["omni"]
    assert told["timings"] == {"thinker": {"run": 0.25}}
    assert told["outputs"]["thinker"] == {"text": "Hello."}
    assert told["outputs"]["talker"] == {"token_ids": [7, 8, 7, 8]}
    assert told["outputs"]["vocoder"]["audio"] == {"data": message(answer)["audio"]["data"]}
    (call,) = app.engine.calls
    assert call is not None
    assert (call.sampling, call.params) == ({"talker": {"seed": 1}}, {"a": 1})


async def test_a_stage_that_fails_after_the_text_fails_the_request(model: Model, speech: Pipeline) -> None:
    error = NoReplicaError("Stage 'talker' has no replica")
    app = PipelineApp(model, speech, *SPEAKING[:5], PipelineCallEnded(error))
    answer = await app.answer(app.chat(modalities=BOTH), 503)
    assert answer["error"]["message"] == str(error)
    assert app.engine.aborted == []


WRONG_AUDIO: dict[str, tuple[list[StageEvent], str]] = {
    "type": (
        [StageEvent("vocoder", StageOutput(tensor=torch.tensor([1])))],
        "audio is a tensor of floats or int16, not torch.int64.",
    ),
    "channels": (
        [StageEvent("vocoder", StageOutput(tensor=torch.zeros(2, 3)))],
        "audio is a tensor of one channel, [samples], not [2, 3].",
    ),
    "rate": (
        [samples(0.1, sample_rate=8000), samples(0.2, sample_rate=16000)],
        "its sample_rate is 16000, and was 8000 before in this answer.",
    ),
}


@pytest.mark.parametrize("fault", WRONG_AUDIO)
async def test_audio_that_cannot_be_played_names_the_stage(model: Model, speech: Pipeline, fault: str) -> None:
    wrong, message = WRONG_AUDIO[fault]
    app = PipelineApp(model, speech, ("Hi.", "stop"), *wrong)
    answer = await app.answer(app.chat(modalities=BOTH), 500)
    assert answer["error"]["message"] == f"Stage 'vocoder': {message}"
    assert len(app.engine.aborted) == 1


async def test_the_sample_rate_of_the_first_samples_is_that_of_all(model: Model, speech: Pipeline) -> None:
    end = StageEvent("vocoder", StageOutput(finish_reason="stop"))
    steps = (("Hi.", "stop"), samples(0.1, sample_rate=8000), samples(0.2), end, PipelineCallEnded(None))
    app = PipelineApp(model, speech, *steps)
    answer = await app.answer(app.chat(modalities=BOTH, omni={"outputs": ["vocoder"]}))
    for audio in (message(answer)["audio"], answer["omni"]["outputs"]["vocoder"]["audio"]):
        with wave.open(io.BytesIO(b64decode(audio["data"]))) as file:
            assert (file.getframerate(), file.getnframes()) == (8000, 2)


@pytest.mark.parametrize("stream", [False, True])
async def test_numbers_that_json_does_not_have_are_null(model: Model, stream: bool) -> None:
    scored = StageEvent("guard", StageOutput(tensor=torch.tensor([float("nan"), 0.5]), finish_reason="stop"))
    app = PipelineApp(model, classified(), ("Hi.", "stop"), scored, PipelineCallEnded(None))
    client = app.chat(stream=stream, omni={"outputs": ["guard"]}, modalities=["text", "scores"])
    assert await client.status() == 200, client.body
    answer = events(client.body)[-1] if stream else json.loads(client.body)
    assert answer["omni"] == {"outputs": {"guard": {"scores": [None, 0.5]}}}


async def test_requests_that_vllm_refuses_are_refused_in_the_same_way(model: Model, speech: Pipeline) -> None:
    app = PipelineApp(model, speech, *SPEAKING)
    answer = await app.answer(app.chat(modalities=BOTH, model="other"), 404)
    assert "`other`" in answer["error"]["message"]
    answer = await app.answer(app.chat(modalities=BOTH, max_completion_tokens=-1), 400)
    assert app.engine.calls == []


@pytest.mark.parametrize("text_ended", [False, True])
async def test_a_client_that_leaves_ends_all_stages(model: Model, speech: Pipeline, text_ended: bool) -> None:
    end: list[Step] = [("lo.", "stop")] if text_ended else []
    app = PipelineApp(model, speech, ("Hel", None), *end)
    client = app.chat(modalities=BOTH)
    await eventually(lambda: bool(app.engine.finished), "the request")
    client.disconnect()
    await eventually(lambda: bool(app.engine.aborted) and (text_ended or bool(app.engine.given_up)), "the abort")
    assert app.engine.aborted == [tuple(app.engine.finished)]
