"""`POST /v1/audio/speech` for a pipeline with audio output."""

import json
from base64 import b64encode
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.entrypoints.serve.utils.api_utils import load_aware_call, validate_json_request, with_cancellation

from vllm_omni_plugin.admin.answers.call_options import BadOptionError, CallOptions, read_call_options
from vllm_omni_plugin.admin.answers.stage_results import StageResults, wav, wav_header
from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.integration.core_client.pipeline_calls import Abort, ActivePipelineCall
from vllm_omni_plugin.integration.core_client.request_failures import to_http
from vllm_omni_plugin.integration.http.pipeline_handler import Create, once
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCallEnded, StageEvent
from vllm_omni_plugin.pipeline import Pipeline

SPEECH_PATH: Final = "/v1/audio/speech"


class SpeechStages(BaseModel):
    model_config = ConfigDict(extra="forbid")

    params: dict[str, Any] = Field(default_factory=dict)
    sampling: dict[str, dict[str, Any]] = Field(default_factory=dict)


class SpeechRequest(BaseModel):
    """OpenAI's body, plus `omni`.

    Attributes:
        input: the prompt of the pipeline's entry stage.
        voice: stages read it as `params["voice"]`, and `instructions` likewise.
        speed: stages that support other speeds read them from `omni.params`.
        stream_format: None sends a WAV file when it is complete, since only then its header can have the length, and
            PCM as it comes.
    """

    model_config = ConfigDict(extra="forbid")

    input: str = Field(min_length=1)
    model: str | None = None
    voice: str | None = None
    instructions: str | None = None
    response_format: Literal["wav", "pcm"] = "wav"
    speed: Literal[1] = 1
    stream_format: Literal["audio", "sse"] | None = None
    omni: SpeechStages = Field(default_factory=SpeechStages)


@dataclass(frozen=True)
class SpeechHandler:
    """Handles requests for speech: the text is the prompt of a completion, which vLLM's `create` makes."""

    serving: Any
    create: Create
    pipeline: Pipeline
    abort: Abort

    async def handle(self, request: SpeechRequest, raw_request: Request) -> Response:
        """The response. Waits for what is sent first, so that an error before it has its own HTTP status."""
        try:
            options = self._options(request)
        except BadOptionError as error:
            return _refusal(self.serving.create_error_response(str(error), param=error.param))
        results = StageResults(options, self.pipeline)
        running = ActivePipelineCall(results.call, self.abort)
        completion = CompletionRequest(model=request.model, prompt=request.input, max_tokens=1)
        items = running.run(once(self.create, completion, raw_request))
        usage: dict[str, int] = {}
        media_type = f"audio/{request.response_format}"
        samples = _samples(results, items, usage)
        try:
            if request.response_format == "wav" and request.stream_format is None:
                async with aclosing(samples):
                    whole = b"".join([part async for part, _ in samples])
                return Response(wav(whole, results.rate), media_type=media_type)
            audio = _audio(results, samples, request.response_format == "wav")
            first = await anext(audio)
        except _RefusedError as refused:
            return _refusal(refused.response)
        except OmniError as error:
            raise to_http(error) from error
        audio = _joined(first, audio)
        if request.stream_format == "sse":
            return StreamingResponse(self._events(audio, usage), media_type="text/event-stream")
        return StreamingResponse(audio, media_type=media_type)

    def _options(self, request: SpeechRequest) -> CallOptions:
        fields = {"modalities": ["audio"], "omni": request.omni.model_dump()}
        options = read_call_options(fields, self.pipeline)
        own = request.model_dump(include={"voice", "instructions"}, exclude_none=True)
        return replace(options, params={**own, **options.params})

    async def _events(self, audio: AsyncGenerator[bytes, None], usage: dict[str, int]) -> AsyncGenerator[str, None]:
        try:
            async for part in audio:
                yield _event({"type": "speech.audio.delta", "audio": b64encode(part).decode()})
        except OmniError as error:
            yield f"data: {self.serving.create_streaming_error_response(to_http(error))}\n\n"
            return
        yield _event({"type": "speech.audio.done", "usage": usage})


class _RefusedError(Exception):
    def __init__(self, response: Any) -> None:
        super().__init__(response.error.message)
        self.response = response


async def _samples(
    results: StageResults, items: AsyncGenerator[Any, None], usage: dict[str, int]
) -> AsyncGenerator[tuple[bytes, bool], None]:
    """The samples of each part of the audio that has some, and whether it is the last. Counts tokens in `usage`."""
    async with aclosing(items):
        async for item in items:
            match item:
                case StageEvent() | PipelineCallEnded():
                    part = results.read(item)
                    if part.samples:
                        yield part.samples, part.last
                case ErrorResponse():
                    raise _RefusedError(item)
                case _:
                    read, made = item.usage.prompt_tokens, item.usage.completion_tokens
                    usage |= {"input_tokens": read, "output_tokens": made, "total_tokens": read + made}


async def _audio(
    results: StageResults, samples: AsyncGenerator[tuple[bytes, bool], None], is_wav: bool
) -> AsyncGenerator[bytes, None]:
    """The audio as it comes, in at least one part. The first part has the header of a WAV file."""
    started = False
    async with aclosing(samples):
        async for part, last in samples:
            size = len(part) if last else None
            yield (wav_header(results.rate, size) if is_wav and not started else b"") + part
            started = True
    if not started:
        yield wav_header(results.rate, 0) if is_wav else b""


def build_speech_router(handler: SpeechHandler) -> APIRouter:
    router = APIRouter()
    # Wrapped like vLLM's own routes: the handler is cancelled if the client disconnects before the first audio.
    endpoint = with_cancellation(load_aware_call(handler.handle))
    guards = [Depends(validate_json_request)]
    router.add_api_route(SPEECH_PATH, endpoint, methods=["POST"], dependencies=guards, response_class=Response)
    return router


def _refusal(response: Any) -> Response:
    return JSONResponse(response.model_dump(), response.error.code)


def _event(event: dict[str, Any]) -> str:
    return f"data: {json.dumps(event)}\n\n"


async def _joined(first: bytes, rest: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(rest):
        yield first
        async for audio in rest:
            yield audio
