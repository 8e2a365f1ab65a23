"""Text, codec tokens and sound, each stage on chunks of the one in front of it: the example `speech`."""

import base64
import functools
import importlib.util
import io
from array import array
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
import soundfile

from tests.pipeline.scenarios import cases

from . import by_hand
from .pipelines import EXAMPLES, ExampleWorld, PipelineServer, shared_example
from .server import ASSIGNMENTS, MODEL
from .servers import Servers

pytestmark = pytest.mark.timeout(600)

THINKER, TALKER, VOCODER = 0, 1, 2
SAMPLE_RATE, HOP = 24_000, 480
CHUNK, CODES_PER_TOKEN = 8, 4
"""Tokens of text in a chunk, and codec tokens that speak one of them."""
ANSWER_TOKENS = 20
"""Two chunks and a half."""
FILE_TOKENS = 64
"""Of an answer at most, as the example's file says."""
PROMPT = "Say something."
BOTH: Any = ["text", "audio"]
VOICE: Any = {"voice": "any", "format": "wav"}
RAW: Any = {"voice": "any", "format": "pcm16"}


@pytest.fixture
def speech(servers: Servers) -> Iterator[PipelineServer]:
    yield from shared_example(servers, "speech", 3)


def spoken(server: PipelineServer, tokens: int = ANSWER_TOKENS) -> bytes:
    """The sound of a chat answer, from the two models and the vocoder run by hand: 16 bit samples."""
    return sound_after(server.models, by_hand.chat_prompt(server.models / "thinker", PROMPT), tokens)


@functools.cache
def sound_after(models: Path, prompt: str, count: int) -> bytes:
    thinker, talker = models / "thinker", models / "talker"
    tokens = by_hand.greedy(thinker, by_hand.token_ids(thinker, prompt), count)
    chunks = [tokens[start : start + CHUNK] for start in range(0, count, CHUNK)]
    texts = [by_hand.token_ids(talker, by_hand.text_of(thinker, chunk)) for chunk in chunks]
    lengths = [CODES_PER_TOKEN * len(chunk) for chunk in chunks]
    return decoded(by_hand.session(talker, zip(texts, lengths, strict=True)))


def decoded(codes: list[int]) -> bytes:
    """Codec tokens as the vocoder's module sounds them, all at once."""
    import torch

    decoder = vocoder().CodecDecoder(codes=128, sample_rate=SAMPLE_RATE, hop=HOP)
    samples, tail = decoder(torch.tensor(codes) - 257, torch.zeros(HOP))
    return bytes((torch.cat([samples, tail]) * 32767).round().to(torch.int16).numpy().tobytes())


@functools.cache
def vocoder() -> Any:
    spec = importlib.util.spec_from_file_location("vocoder", EXAMPLES / "stages" / "vocoder.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def text_by_hand(server: PipelineServer) -> str:
    thinker = server.models / "thinker"
    return by_hand.answer(thinker, by_hand.chat_prompt(thinker, PROMPT), ANSWER_TOKENS)


def pcm_of(wav: bytes) -> bytes:
    """The samples of a wav file, as libsndfile decodes it."""
    with soundfile.SoundFile(io.BytesIO(wav)) as sound:
        assert (sound.format, sound.subtype) == ("WAV", "PCM_16")
        assert (sound.channels, sound.samplerate) == (1, SAMPLE_RATE)
        return bytes(sound.read(dtype="int16").tobytes())


def assert_same_sound(pcm: bytes, expected: bytes) -> None:
    """Up to rounding to 16 bits."""
    heard, wanted = array("h", pcm), array("h", expected)
    assert len(heard) == len(wanted)
    assert max(abs(a - b) for a, b in zip(heard, wanted, strict=True)) <= 1
    assert max(heard) > 3000, "it is no silence"


def ask(server: PipelineServer, **more: Any) -> Any:
    with server.client() as client:
        return client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": PROMPT}], max_tokens=ANSWER_TOKENS, **more
        )


def test_a_request_for_text_skips_the_talker(speech: PipelineServer) -> None:
    before = speech.assigned()
    message = ask(speech).choices[0].message
    assert message.content == text_by_hand(speech)
    assert message.audio is None
    assert speech.assigned() == before | {THINKER: before[THINKER] + 1}


def test_an_answer_comes_as_text_and_as_a_playable_file(speech: PipelineServer) -> None:
    message = ask(speech, modalities=BOTH, audio=VOICE).choices[0].message
    assert message.content == text_by_hand(speech)
    assert message.audio.transcript == message.content
    pcm = pcm_of(base64.b64decode(message.audio.data))
    assert len(pcm) == 2 * HOP * (CODES_PER_TOKEN * ANSWER_TOKENS + 1)
    assert_same_sound(pcm, spoken(speech))


def open_stream(client: openai.OpenAI, tokens: int = ANSWER_TOKENS) -> Any:
    return client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": PROMPT}],
        max_tokens=tokens,
        modalities=BOTH,
        audio=RAW,
        stream=True,
    )


def text_delta(chunk: Any) -> str:
    return "".join(choice.delta.content or "" for choice in chunk.choices)


def audio_delta(chunk: Any) -> bytes:
    return b"".join(base64.b64decode(choice.delta.audio.data or "") for choice in chunk.choices if choice.delta.audio)


def test_a_stream_carries_the_same_text_and_sound(speech: PipelineServer) -> None:
    with speech.client() as client:
        chunks = list(open_stream(client))
    assert "".join(map(text_delta, chunks)) == text_by_hand(speech)
    assert_same_sound(b"".join(map(audio_delta, chunks)), spoken(speech))


def test_the_first_sound_leaves_before_the_text_ends(speech: PipelineServer) -> None:
    with speech.client() as client, ExitStack() as standing_still, open_stream(client, FILE_TOKENS) as stream:
        words = 0
        for chunk in stream:
            assert not any(choice.finish_reason for choice in chunk.choices)
            if audio_delta(chunk):
                break
            words += bool(text_delta(chunk))
            if words == 2 * CHUNK:
                # From now on the text cannot end, however long the sound takes.
                standing_still.enter_context(speech.suspended(THINKER))
        else:
            pytest.fail("there was no sound")


@pytest.mark.parametrize("response_format", ["wav", "pcm"])
def test_the_speech_route_speaks_the_answer_to_its_input(speech: PipelineServer, response_format: Any) -> None:
    with speech.client() as client:
        said = client.audio.speech.create(model=MODEL, voice="any", input=PROMPT, response_format=response_format)
    pcm = pcm_of(said.content) if response_format == "wav" else said.content
    assert_same_sound(pcm, sound_after(speech.models, PROMPT, FILE_TOKENS))


def test_the_speech_route_streams(speech: PipelineServer) -> None:
    with (
        speech.client() as client,
        client.audio.speech.with_streaming_response.create(
            model=MODEL, voice="any", input=PROMPT, response_format="pcm"
        ) as stream,
    ):
        parts = list(stream.iter_bytes())
    assert len(parts) > 1
    assert_same_sound(b"".join(parts), sound_after(speech.models, PROMPT, FILE_TOKENS))


@pytest.mark.parametrize(("scenario", "stage_id"), cases([THINKER, TALKER, VOCODER], quick={"killed-2", "left-1"}))
async def test_what_happens_to_a_request(speech: PipelineServer, scenario: Any, stage_id: int) -> None:
    def check(answer: Any) -> None:
        message = answer["choices"][0]["message"]
        assert message["content"] == text_by_hand(speech)
        assert_same_sound(pcm_of(base64.b64decode(message["audio"]["data"])), spoken(speech))

    asked = [{"role": "user", "content": PROMPT}]
    body = {"messages": asked, "max_tokens": ANSWER_TOKENS, "modalities": BOTH, "audio": VOICE}
    await scenario(ExampleWorld(speech, "/v1/chat/completions", body, check, 3), stage_id)


@pytest.mark.long
def test_a_headless_node_serves_the_vocoder(speech: PipelineServer) -> None:
    with speech.node(VOCODER), speech.drained(VOCODER):
        sound = ask(speech, modalities=BOTH, audio=VOICE).choices[0].message.audio
        assignments = speech.by_replica_of(VOCODER, ASSIGNMENTS)
    assert assignments[1] == 1
    assert_same_sound(pcm_of(base64.b64decode(sound.data)), spoken(speech))


@pytest.mark.long
def test_a_vocoder_killed_in_the_middle_of_its_sound_repeats_none_of_it(speech: PipelineServer) -> None:
    # An answer may be over before its vocoder can be stopped; then the next one is tried.
    assert any(killed_in_its_sound(speech) for _ in range(5))


def killed_in_its_sound(speech: PipelineServer) -> bool:
    """Whether the vocoder was killed in the middle of an answer, whose sound is as of any other."""
    with speech.client() as client, open_stream(client, FILE_TOKENS) as stream:
        pcm = b""
        while not pcm:
            pcm += audio_delta(next(stream))
        # The talker stands still, so that the vocoder has not got all of its input.
        with speech.suspended(TALKER), speech.suspended(VOCODER) as engine:
            is_in_time = speech.in_flight(VOCODER) == 1
            if is_in_time:
                engine.core.kill()
        pcm += b"".join(map(audio_delta, stream))
    assert_same_sound(pcm, spoken(speech, FILE_TOKENS))
    return is_in_time
