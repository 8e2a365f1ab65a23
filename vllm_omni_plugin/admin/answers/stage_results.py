"""Collects the outputs of stages for the answer to one request."""

from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_omni_plugin.admin.answers.audio import DEFAULT_SAMPLE_RATE, pcm16, sample_rate, wav
from vllm_omni_plugin.admin.answers.call_options import CallOptions
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCall, PipelineCallEnded, StageEvent
from vllm_omni_plugin.pipeline import Modality, Pipeline, Stage, StageOutput


class AudioPart(NamedTuple):
    """What one event adds to the answer's audio: samples are 16-bit PCM; `last` means that no more samples follow."""

    samples: bytes = b""
    transcript: str = ""
    last: bool = False


class StageResults:
    """Reads the events of one call. `rate` is the audio's sample rate in hertz, known after the first samples."""

    def __init__(self, options: CallOptions, pipeline: Pipeline) -> None:
        self._options = options
        self._pipeline = pipeline
        self._audio_stage = _audio_stage(pipeline) if options.audio else None
        self._text_stage = _text_stage(self._audio_stage, pipeline) if self._audio_stage is not None else None
        self._outputs: defaultdict[str, list[StageOutput]] = defaultdict(list)
        self._timings: Mapping[str, Mapping[str, float]] = {}
        self.rate = DEFAULT_SAMPLE_RATE

    def call(self, put: Callable[[StageEvent | PipelineCallEnded], None]) -> PipelineCall:
        """The message to the orchestrator; `put` receives the events."""
        transcript = {self._text_stage.name} if self._text_stage is not None else set()
        options = self._options
        return PipelineCall(options.modalities, put, options.outputs | transcript, options.sampling, options.params)

    def read(self, event: StageEvent | PipelineCallEnded) -> AudioPart:
        """Process one event. Raises the error that ended the call early, or StageError for invalid audio."""
        if isinstance(event, PipelineCallEnded):
            if event.error is not None:
                raise event.error
            self._timings = event.timings
            return AudioPart()
        stage, output = event.stage, event.output
        if stage in self._options.outputs:
            self._outputs[stage].append(output)
        if self._audio_stage is not None and stage == self._audio_stage.name:
            if output.tensor is not None:
                self.rate = sample_rate(stage, output)
            return AudioPart(pcm16(stage, output), last=output.finish_reason is not None)
        if self._text_stage is not None and stage == self._text_stage.name:
            return AudioPart(transcript=output.text)
        return AudioPart()

    @property
    def omni(self) -> dict[str, Any]:
        """The field `omni` of the answer; empty if the request asked for none of it."""
        options, stage = self._options, self._pipeline.stage
        shown = {name: _shown(stage(name), self._outputs[name]) for name in sorted(options.outputs)}
        timings = {name: dict(seconds) for name, seconds in self._timings.items()}
        return ({"outputs": shown} if shown else {}) | ({"timings": timings} if options.timings else {})


def _audio_stage(pipeline: Pipeline) -> Stage:
    return [stage for stage in pipeline.order if stage.final and stage.output is Modality.AUDIO][-1]


def _text_stage(audio_stage: Stage, pipeline: Pipeline) -> Stage | None:
    """The nearest upstream stage of the audio stage with text output, which is the transcript."""
    nearest = pipeline.upstream(audio_stage)
    while nearest:
        for stage in nearest:
            if stage.output is Modality.TEXT:
                return stage
        nearest = tuple(up for stage in nearest for up in pipeline.upstream(stage))
    return None


def _shown(stage: Stage, outputs: Sequence[StageOutput]) -> dict[str, Any]:
    match stage.output:
        case Modality.TEXT:
            return {"text": "".join(output.text for output in outputs)}
        case Modality.TOKENS:
            return {"token_ids": [token for output in outputs for token in output.token_ids]}
        case Modality.AUDIO:
            samples = b"".join(pcm16(stage.name, output) for output in outputs)
            rate = sample_rate(stage.name, outputs[-1]) if outputs else DEFAULT_SAMPLE_RATE
            return {"audio": {"data": b64encode(wav(samples, rate)).decode()}}
        case _:
            tensors = [output.tensor.tolist() for output in outputs if output.tensor is not None]
            return {stage.output.value: tensors[0] if len(tensors) == 1 else tensors}
