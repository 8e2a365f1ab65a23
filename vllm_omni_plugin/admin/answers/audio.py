"""Encodes the audio of a stage as PCM or WAV: 16-bit samples, one channel, little-endian."""

import struct
from typing import Any, Final

from vllm_omni_plugin.errors import StageError
from vllm_omni_plugin.pipeline import StageOutput

DEFAULT_SAMPLE_RATE: Final = 24_000
"""Hertz; the rate of OpenAI's `pcm16`, and of a stage that does not set `sample_rate`."""

_UNKNOWN: Final = 0xFFFF_FFFF
_SAMPLE_BYTES: Final = 2
_PCM: Final = 1
_CHANNELS: Final = 1
_GREATEST_RATE: Final = _UNKNOWN // _SAMPLE_BYTES
"""A WAV file has 32 bits for the bytes per second."""


def sample_rate(stage: str, output: StageOutput) -> int:
    """The `sample_rate` of an output's metadata, in hertz. Raises StageError if a WAV file cannot have it."""
    rate = output.metadata.get("sample_rate", DEFAULT_SAMPLE_RATE)
    if not isinstance(rate, int) or not 0 < rate <= _GREATEST_RATE:
        raise StageError(f"Stage '{stage}': its sample_rate is {rate!r}, and must be hertz as a whole number.")
    return rate


def pcm16(stage: str, output: StageOutput) -> bytes:
    """The samples of an output's tensor `[samples]`; b"" without one.

    int16, or floats from -1 to 1; other values are clipped, and NaN is silence. Raises StageError for other types.
    """
    samples: Any = output.tensor
    if samples is None:
        return b""
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
