"""Streamed answers of a pipeline: vLLM's server-sent events, with what the stages put out between them."""

import json
from base64 import b64encode
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from typing import Any, Final
from uuid import uuid4

from vllm_omni_plugin.admin.answers.call_options import CallOptions
from vllm_omni_plugin.admin.answers.stage_results import AudioPart, StageResults
from vllm_omni_plugin.integration.engine_client.pipeline_calls import RunningCall
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import CallEnded, StageEvent

DONE: Final = "data: [DONE]\n\n"

_WHOLE: Final = 6
"""Bytes: whole samples that are whole groups of Base64, so that a client may join what is encoded."""
_ENVELOPE: Final = ("id", "object", "created", "model")


class AnswerStream:
    """The events of one answer.

    Audio is sent at once. What ends the answer is sent after all stages have ended: clients stop reading there.

    Args:
        options: what the request wants.
        results: of its stages.
        envelope: `id`, `object`, `created` and `model` of events before vLLM's first.
        error_event: formats an error as vLLM's server does in a stream.
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

    async def run(self, running: RunningCall, chunks: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
        """All events, the last one being `[DONE]`.

        Args:
            running: the call.
            chunks: vLLM's events.
        """
        try:
            async with aclosing(running.run(chunks)) as items:
                async for item in items:
                    for event in self._read(item):
                        yield event
                    if self._failed:
                        break
            if not self._failed:
                for event in self._ending():
                    yield event
        except Exception as error:
            yield _event(self._error_event(error))
        yield DONE

    def _read(self, item: str | StageEvent | CallEnded) -> Iterator[str]:
        match item:
            case StageEvent() | CallEnded():
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
        """The part of vLLM's event that is sent now; what ends the answer is kept."""
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
        """Send the last text now, and keep the finish reason."""
        (choice,) = chunk["choices"]
        end = {key: choice.pop(key) for key in ("finish_reason", "stop_reason") if key in choice}
        self._finish = chunk | {"choices": [{"index": 0, "delta": {}, **end}]}
        if self._options.text:
            yield self._chunk([{**choice, "finish_reason": None}])

    def _ending(self) -> Iterator[str]:
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
            # In the first only: clients that gather deltas join equal keys.
            fields["id"] = self._audio_id
            if not self._options.text:
                delta = {"role": "assistant", "content": None, **delta}
        return self._chunk([{"index": 0, "delta": delta, "finish_reason": None}])

    def _chunk(self, choices: list[dict[str, Any]], **fields: Any) -> str:
        return _event(json.dumps({**self._envelope, **fields, "choices": choices}))


def _event(data: str) -> str:
    return f"data: {data}\n\n"
