"""Collects the outputs of stages for the answer to one request, and encodes audio: 16-bit samples, one channel."""

import struct
from base64 import b64encode
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from vllm_omni_plugin.admin.answers.call_options import CallOptions
from vllm_omni_plugin.errors import StageError
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import PipelineCall, PipelineCallEnded, StageEvent
from vllm_omni_plugin.pipeline import Modality, Pipeline, Stage, StageOutput

DEFAULT_SAMPLE_RATE: Final = 24_000
"""Hertz; the rate of OpenAI's `pcm16`, and of a stage that does not set `sample_rate`."""

_UNKNOWN: Final = 0xFFFF_FFFF
_SAMPLE_BYTES: Final = 2
_PCM: Final = 1
_CHANNELS: Final = 1
_GREATEST_RATE: Final = _UNKNOWN // _SAMPLE_BYTES
"""A WAV file has 32 bits for the bytes per second."""


def sample_rate(stage: str, output: StageOutput, before: int | None = None) -> int:
    """The `sample_rate` of an output's metadata in hertz, else that of the outputs `before` it.

    Raises StageError if a WAV file cannot have it, or it is another than before.
    """
    rate = output.metadata.get("sample_rate", before or DEFAULT_SAMPLE_RATE)
    if type(rate) is not int or not 0 < rate <= _GREATEST_RATE:
        raise StageError(f"Stage '{stage}': its sample_rate is {rate!r}, and must be hertz as a whole number.")
    if before not in (None, rate):
        raise StageError(f"Stage '{stage}': its sample_rate is {rate}, and was {before} before in this answer.")
    return rate


def pcm16(stage: str, output: StageOutput) -> bytes:
    """The samples of an output's tensor `[samples]`; b"" without one.

    int16, or floats from -1 to 1; other values are clipped, and NaN is silence. Raises StageError for other types, and
    for several channels.
    """
    samples: Any = output.tensor
    if samples is None:
        return b""
    if samples.numel() > max((1, *samples.shape)):
        raise StageError(f"Stage '{stage}': audio is a tensor of one channel, [samples], not {list(samples.shape)}.")
    if samples.is_floating_point():
        samples = (samples.float().nan_to_num(0.0).clamp(-1.0, 1.0) * 32767.0).round().short()
    elif str(samples.dtype) != "torch.int16":
        raise StageError(f"Stage '{stage}': audio is a tensor of floats or int16, not {samples.dtype}.")
    return bytes(samples.detach().cpu().contiguous().numpy().astype("<i2").tobytes())


def wav(samples: bytes, rate: int) -> bytes:
    return wav_header(rate, len(samples)) + samples


def wav_header(rate: int, size: int | None) -> bytes:
    """The header of a WAV file; `size` is bytes of samples (None, unknown: until the end of the file)."""
    data = _UNKNOWN if size is None else size
    riff = _UNKNOWN if size is None else size + 36
    bytes_per_second = rate * _SAMPLE_BYTES
    described = struct.pack("<IHHIIHH", 16, _PCM, _CHANNELS, rate, bytes_per_second, _SAMPLE_BYTES, 8 * _SAMPLE_BYTES)
    return b"RIFF" + struct.pack("<I", riff) + b"WAVEfmt " + described + b"data" + struct.pack("<I", data)


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
        self._rate: int | None = None

    @property
    def rate(self) -> int:
        return self._rate or DEFAULT_SAMPLE_RATE

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
                self._rate = sample_rate(stage, output, self._rate)
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
    """Of several final stages with audio, the last one is heard."""
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
            samples, rate = b"".join(pcm16(stage.name, output) for output in outputs), None
            for output in outputs:
                rate = rate if output.tensor is None else sample_rate(stage.name, output, rate)
            return {"audio": {"data": b64encode(wav(samples, rate or DEFAULT_SAMPLE_RATE)).decode()}}
        case _:
            tensors = [output.tensor.tolist() for output in outputs if output.tensor is not None]
            # JSON has no NaN; msgspec makes it null.
            shown = msgspec.json.decode(msgspec.json.encode(tensors[0] if len(tensors) == 1 else tensors))
            return {stage.output.value: shown}
