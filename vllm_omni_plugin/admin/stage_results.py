"""What stages put out for one request, read for the body of its answer."""

from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_omni_plugin.admin.audio import DEFAULT_SAMPLE_RATE, pcm16, sample_rate, wav
from vllm_omni_plugin.admin.call_options import CallOptions
from vllm_omni_plugin.orchestrator.pipeline_call import CallEnded, PipelineCall, StageEvent
from vllm_omni_plugin.pipeline.graph import Pipeline
from vllm_omni_plugin.pipeline.stage import Modality, Stage
from vllm_omni_plugin.pipeline.transfer import StageOutput


class Heard(NamedTuple):
    """What an event adds to the answer's audio.

    Attributes:
        samples: 16 bit PCM.
        transcript: what is spoken, as text.
    """

    samples: bytes = b""
    transcript: str = ""


class StageResults:
    """Reads the events of one call.

    Args:
        options: what the request wants.
        pipeline: what runs it.

    Attributes:
        rate: hertz of the audio, once some has come.
    """

    def __init__(self, options: CallOptions, pipeline: Pipeline) -> None:
        self._options = options
        self._pipeline = pipeline
        self._speaker = _speaker(pipeline) if options.audio else None
        self._spoken = _spoken(self._speaker, pipeline) if self._speaker is not None else None
        self._outputs: defaultdict[str, list[StageOutput]] = defaultdict(list)
        self._timings: Mapping[str, Mapping[str, float]] = {}
        self.rate = DEFAULT_SAMPLE_RATE

    def call(self, put: Callable[[StageEvent | CallEnded], None]) -> PipelineCall:
        """What the orchestrator is asked for."""
        spoken = {self._spoken.name} if self._spoken is not None else set()
        options = self._options
        return PipelineCall(options.modalities, put, options.outputs | spoken, options.sampling, options.params)

    def add(self, event: StageEvent) -> Heard:
        """A stage has put something out.

        Raises:
            StageError: its audio is no audio.
        """
        if event.stage in self._options.outputs:
            self._outputs[event.stage].append(event.output)
        if self._speaker is not None and event.stage == self._speaker.name:
            if event.output.tensor is not None:
                self.rate = sample_rate(event.stage, event.output)
            return Heard(samples=pcm16(event.stage, event.output))
        if self._spoken is not None and event.stage == self._spoken.name:
            return Heard(transcript=event.output.text)
        return Heard()

    def end(self, ended: CallEnded) -> None:
        """Nothing more comes. Raises the error that ended the call early, if there was one."""
        if ended.error is not None:
            raise ended.error
        self._timings = ended.timings

    @property
    def omni(self) -> dict[str, Any]:
        """The answer's field `omni`; empty if nothing was asked for that stands there."""
        options, stage = self._options, self._pipeline.stage
        shown = {name: _shown(stage(name), self._outputs[name]) for name in sorted(options.outputs)}
        timings = {name: dict(seconds) for name, seconds in self._timings.items()}
        return ({"outputs": shown} if shown else {}) | ({"timings": timings} if options.timings else {})


def _speaker(pipeline: Pipeline) -> Stage:
    return [stage for stage in pipeline.order if stage.final and stage.output is Modality.AUDIO][-1]


def _spoken(speaker: Stage, pipeline: Pipeline) -> Stage | None:
    """The nearest stage in front of it that puts out text."""
    front = pipeline.upstream(speaker)
    while front:
        for stage in front:
            if stage.output is Modality.TEXT:
                return stage
        front = tuple(up for stage in front for up in pipeline.upstream(stage))
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
