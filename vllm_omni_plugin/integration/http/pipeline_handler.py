"""Chat and completions of a pipeline: vLLM's handlers make the response, and the outputs of other stages are added."""

import json
import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from fastapi import Request
from vllm.entrypoints.openai.chat_completion.protocol import OpenAIChatCompletionAudio
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from vllm_omni_plugin.admin.answers.call_options import BadOptionError, CallOptions, read_call_options
from vllm_omni_plugin.admin.answers.stage_results import AudioPart, StageResults, wav
from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.integration.core_client.pipeline_calls import Abort, ActivePipelineCall
from vllm_omni_plugin.integration.core_client.request_failures import to_http
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCallEnded, StageEvent
from vllm_omni_plugin.pipeline import Pipeline

DONE: Final = "data: [DONE]\n\n"

_WHOLE: Final = 6
"""Bytes that are whole samples and whole groups of Base64, so that a client may concatenate the encoded parts."""
_ENVELOPE: Final = ("id", "object", "created", "model")

Create = Callable[[Any, Request], Awaitable[Any]]
"""A handler of vLLM: returns the response, an async generator of a stream's events, or an `ErrorResponse`."""


class ResponseStream:
    """The server-sent events of one streamed response.

    Audio is sent at once. The finish reason is sent after all stages have ended, because clients stop reading there.
    `envelope` has the common fields of events before vLLM's first event.
    """

    def __init__(
        self,
        options: CallOptions,
        results: StageResults,
        envelope: dict[str, Any],
        error_event: Callable[[Exception], str],
    ) -> None:
        self._options = options
        self._results = results
        self._envelope = envelope
        self._error_event = error_event
        self._audio_id = f"audio_{uuid4().hex}"
        self._audio_began = False
        self._samples = b""
        self._finish: dict[str, Any] | None = None
        self._usage: list[str] = []
        self._failed = False

    async def run(self, running: ActivePipelineCall, chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """All events, ending with `[DONE]`. `chunks`: vLLM's events."""
        try:
            async with aclosing(running.run(chunks)) as items:
                async for item in items:
                    for event in self._read(item):
                        yield event
                    if self._failed:
                        break
            if not self._failed:
                for event in self._final_events():
                    yield event
        except Exception as error:
            yield _event(self._error_event(error))
        yield DONE

    def _read(self, item: str | StageEvent | PipelineCallEnded) -> Iterator[str]:
        match item:
            case StageEvent() | PipelineCallEnded():
                return self._audio_events(self._results.read(item))
            case _:
                return self._text_events(item)

    def _audio_events(self, part: AudioPart) -> Iterator[str]:
        if part.transcript:
            yield self._audio({"transcript": part.transcript})
        self._samples += part.samples
        whole = len(self._samples) // _WHOLE * _WHOLE
        if whole:
            yield self._data(whole)

    def _text_events(self, event: str) -> Iterator[str]:
        """The part of vLLM's event that is sent now. The finish reason is kept."""
        if event == DONE:
            return
        chunk: dict[str, Any] = json.loads(event.removeprefix("data: "))
        if "error" in chunk:
            self._failed = True
            yield event
            return
        self._envelope |= {key: chunk[key] for key in _ENVELOPE}
        if not self._options.audio:
            yield event
        elif not chunk["choices"]:
            self._usage.append(event)
        elif chunk["choices"][0].get("finish_reason") is None:
            if self._options.text:
                yield event
        else:
            yield from self._split_last(chunk)

    def _split_last(self, chunk: dict[str, Any]) -> Iterator[str]:
        (choice,) = chunk["choices"]
        end = {key: choice.pop(key) for key in ("finish_reason", "stop_reason") if key in choice}
        self._finish = chunk | {"choices": [{"index": 0, "delta": {}, **end}]}
        if self._options.text:
            yield self._chunk([{**choice, "finish_reason": None}])

    def _final_events(self) -> Iterator[str]:
        if self._options.audio:
            if self._samples:
                yield self._data(len(self._samples))
            # The server stores no audio, so a later turn cannot refer to it: it expires at once.
            yield self._audio({"expires_at": self._envelope["created"]})
            # vLLM does not finish a choice that has no text.
            no_text = [{"index": 0, "delta": {}, "finish_reason": "stop"}]
            yield self._chunk(**(self._finish or {"choices": no_text}))
        yield from self._usage
        if omni := self._results.omni:
            yield self._chunk([], omni=omni)

    def _data(self, size: int) -> str:
        samples, self._samples = self._samples[:size], self._samples[size:]
        return self._audio({"data": b64encode(samples).decode()})

    def _audio(self, fields: dict[str, Any]) -> str:
        delta: dict[str, Any] = {"audio": fields}
        if not self._audio_began:
            self._audio_began = True
            # Only in the first event: clients that merge deltas concatenate values of equal keys.
            fields["id"] = self._audio_id
            if not self._options.text:
                delta = {"role": "assistant", "content": None, **delta}
        return self._chunk([{"index": 0, "delta": delta, "finish_reason": None}])

    def _chunk(self, choices: list[dict[str, Any]], **fields: Any) -> str:
        return _event(json.dumps({**self._envelope, **fields, "choices": choices}))


def _event(data: str) -> str:
    return f"data: {data}\n\n"


@dataclass(frozen=True)
class PipelineHandler:
    """Wraps `create`, one of vLLM's handlers, and its serving object. Only the handler of chat has audio."""

    serving: Any
    create: Create
    pipeline: Pipeline
    abort: Abort
    chat: bool

    async def handle(self, request: Any, raw_request: Request) -> Any:
        """The response of vLLM's handler, plus the outputs of other stages for which the request asks."""
        try:
            options = self._read(request)
        except BadOptionError as error:
            return self.serving.create_error_response(str(error), param=error.param)
        if options == CallOptions(self.pipeline.default_modalities) and not options.shows:
            return await self.create(request, raw_request)
        results = StageResults(options, self.pipeline)
        running = ActivePipelineCall(results.call, self.abort)
        if not request.stream:
            try:
                return await self._whole(options, results, running, once(self.create, request, raw_request))
            except OmniError as error:
                raise to_http(error) from error
        chunks = await self.create(request, raw_request)
        if isinstance(chunks, ErrorResponse):
            return chunks
        return ResponseStream(options, results, self._envelope(request, raw_request), self._error_event).run(
            running, chunks
        )

    def _read(self, request: Any) -> CallOptions:
        """Read the client's options; 400 for audio of completions, of several answers, or as wav in a stream."""
        options = read_call_options(request.model_extra or {}, self.pipeline)
        if options.audio and not self.chat:
            where = "/v1/chat/completions or /v1/audio/speech"
            raise BadOptionError(f"Completions cannot return audio. Use {where}.", "modalities")
        if options.shows and not _makes_one_request(request):
            alone = "Audio, `omni.outputs` and `omni.timings` need a single response"
            raise BadOptionError(f"{alone}: one prompt, `n` 1 and no beam search.", "n")
        if request.stream and options.audio_format == "wav":
            raise BadOptionError(
                "A stream of audio is `pcm16`; `wav` is for responses that are not streamed.", "audio.format"
            )
        return options

    async def _whole(
        self,
        options: CallOptions,
        results: StageResults,
        running: ActivePipelineCall,
        answer: AsyncGenerator[Any, None],
    ) -> Any:
        """Wait for all outputs, and put audio and `omni` into vLLM's response; no text if none was asked for."""
        samples, transcript = bytearray(), ""
        response: Any = None
        async with aclosing(running.run(answer)) as items:
            async for item in items:
                match item:
                    case StageEvent() | PipelineCallEnded():
                        part = results.read(item)
                        samples += part.samples
                        transcript += part.transcript
                    case ErrorResponse():
                        return item
                    case _:
                        response = item
        if options.audio:
            data = bytes(samples) if options.audio_format == "pcm16" else wav(bytes(samples), results.rate)
            response.choices[0].message.audio = _audio(data, transcript, response.created)
        if self.chat and not options.text:
            response.choices[0].message.content = None
        if omni := results.omni:
            response.omni = omni
        return response

    def _envelope(self, request: Any, raw_request: Request) -> dict[str, Any]:
        models = self.serving.models
        return {
            "id": raw_request.state.request_metadata.request_id,
            "object": "chat.completion.chunk" if self.chat else "text_completion",
            "created": int(time.time()),
            "model": models.model_name(models.lora_requests.get(request.model)),
        }

    def _error_event(self, error: Exception) -> str:
        event: str = self.serving.create_streaming_error_response(
            to_http(error) if isinstance(error, OmniError) else error
        )
        return event


async def once(create: Create, request: Any, raw_request: Request) -> AsyncGenerator[Any, None]:
    yield await create(request, raw_request)


def _makes_one_request(request: Any) -> bool:
    prompt = getattr(request, "prompt", None)
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return (request.n or 1) == 1 and not request.use_beam_search and not several


def _audio(data: bytes, transcript: str, created: int) -> Any:
    # The server stores no audio, so a later turn cannot refer to it: it expires at once.
    return OpenAIChatCompletionAudio(
        id=f"audio_{uuid4().hex}", data=b64encode(data).decode(), expires_at=created, transcript=transcript
    )
