"""Chat and completions of a pipeline: vLLM's handlers answer, and the outputs of other stages are added.

Templates, tools, usage, errors and streams stay vLLM's: its handler makes the request and writes the answer.
"""

import time
from base64 import b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any
from uuid import uuid4

from fastapi import Request
from vllm.entrypoints.openai.chat_completion.protocol import OpenAIChatCompletionAudio
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from vllm_omni_plugin.admin.answers.audio import wav
from vllm_omni_plugin.admin.answers.call_options import BadOptionError, CallOptions, read_call_options
from vllm_omni_plugin.admin.answers.stage_results import StageResults
from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.integration.engine_client.pipeline_calls import Abort, RunningCall
from vllm_omni_plugin.integration.engine_client.request_failures import to_http
from vllm_omni_plugin.integration.http.pipeline_stream import AnswerStream
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import CallEnded, StageEvent
from vllm_omni_plugin.pipeline.graph import Pipeline

Create = Callable[[Any, Request], Awaitable[Any]]
"""A vLLM handler: returns the answer, an async generator of a stream's events, or an `ErrorResponse`."""


class PipelineAnswers:
    """Wraps one of vLLM's handlers.

    Args:
        serving: vLLM's serving object, which formats errors and knows the names of the model.
        create: its handler.
        pipeline: what it serves.
        abort: see `Abort`.
        chat: it is the handler of chat completions, whose answers can have audio.
    """

    def __init__(self, serving: Any, create: Create, pipeline: Pipeline, abort: Abort, chat: bool) -> None:
        self._serving = serving
        self._create = create
        self._pipeline = pipeline
        self._abort = abort
        self._chat = chat

    async def create(self, request: Any, raw_request: Request) -> Any:
        """What vLLM's handler answers, with what the request asks of other stages."""
        try:
            options = self._read(request)
        except BadOptionError as error:
            return self._serving.create_error_response(str(error), param=error.param)
        if options == CallOptions(self._pipeline.default_modalities) and not options.shows:
            return await self._create(request, raw_request)
        results = StageResults(options, self._pipeline)
        running = RunningCall(results.call, self._abort)
        if not request.stream:
            try:
                return await self._whole(options, results, running, once(self._create, request, raw_request))
            except OmniError as error:
                raise to_http(error) from error
        chunks = await self._create(request, raw_request)
        if isinstance(chunks, ErrorResponse):
            return chunks
        return AnswerStream(options, results, self._envelope(request, raw_request), self._error_event).run(
            running, chunks
        )

    def _read(self, request: Any) -> CallOptions:
        options = read_call_options(request.model_extra or {}, self._pipeline)
        if options.audio and not self._chat:
            where = "/v1/chat/completions and /v1/audio/speech"
            raise BadOptionError(f"Audio is not among what completions answer with: {where} do.", "modalities")
        if options.shows and not _makes_one_request(request):
            alone = "Audio, `omni.outputs` and `omni.timings` belong to a single answer"
            raise BadOptionError(f"{alone}: one prompt, `n` 1 and no beam search.", "n")
        if request.stream and options.audio_format == "wav":
            raise BadOptionError("A stream of audio is `pcm16`; `wav` is for whole answers.", "audio.format")
        return options

    async def _whole(
        self, options: CallOptions, results: StageResults, running: RunningCall, answer: AsyncGenerator[Any, None]
    ) -> Any:
        samples, transcript = bytearray(), ""
        response: Any = None
        async with aclosing(running.run(answer)) as items:
            async for item in items:
                match item:
                    case StageEvent() | CallEnded():
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
        if self._chat and not options.text:
            response.choices[0].message.content = None
        if omni := results.omni:
            response.omni = omni
        return response

    def _envelope(self, request: Any, raw_request: Request) -> dict[str, Any]:
        models = self._serving.models
        return {
            "id": raw_request.state.request_metadata.request_id,
            "object": "chat.completion.chunk" if self._chat else "text_completion",
            "created": int(time.time()),
            "model": models.model_name(models.lora_requests.get(request.model)),
        }

    def _error_event(self, error: Exception) -> str:
        event: str = self._serving.create_streaming_error_response(
            to_http(error) if isinstance(error, OmniError) else error
        )
        return event


async def once(create: Create, request: Any, raw_request: Request) -> AsyncGenerator[Any, None]:
    """A handler's only answer, as a stream of one."""
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
