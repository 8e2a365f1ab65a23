"""Audio of a stage as bytes that a player takes: 16 bit samples of one channel, little-endian."""

import struct
from typing import Any, Final

from vllm_omni_plugin.errors import StageError
from vllm_omni_plugin.pipeline.transfer import StageOutput

DEFAULT_SAMPLE_RATE: Final = 24_000
"""Hertz; what OpenAI's `pcm16` means, and what audio has whose stage does not say otherwise."""

_UNKNOWN: Final = 0xFFFF_FFFF
_SAMPLE_BYTES: Final = 2
_PCM: Final = 1
_CHANNELS: Final = 1
_GREATEST_RATE: Final = _UNKNOWN // _SAMPLE_BYTES
"""A WAV file has 32 bits for the bytes per second."""


def sample_rate(stage: str, output: StageOutput) -> int:
    """Hertz of its audio: `sample_rate` of its metadata.

    Raises:
        StageError: that is none which a WAV file can have.
    """
    rate = output.metadata.get("sample_rate", DEFAULT_SAMPLE_RATE)
    if not isinstance(rate, int) or not 0 < rate <= _GREATEST_RATE:
        raise StageError(f"Stage '{stage}': its sample_rate is {rate!r}, and must be hertz as a whole number.")
    return rate


def pcm16(stage: str, output: StageOutput) -> bytes:
    """The samples of its tensor; b"" without one.

    Args:
        output: with a tensor `[samples]` of floats, where -1 to 1 is the range (what is beyond it is clipped, what is
            no number is silence), or of int16.

    Raises:
        StageError: the tensor is of another type.
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
    """A WAV file of these samples; `rate` in hertz."""
    return wav_header(rate, len(samples)) + samples


def wav_header(rate: int, size: int | None) -> bytes:
    """What stands before the samples in a WAV file.

    Args:
        rate: hertz.
        size: bytes of samples; None while they are still being made: then the header has the largest value, which
            players take for "to the end of the file".
    """
    data = _UNKNOWN if size is None else size
    riff = _UNKNOWN if size is None else size + 36
    bytes_per_second = rate * _SAMPLE_BYTES
    described = struct.pack("<IHHIIHH", 16, _PCM, _CHANNELS, rate, bytes_per_second, _SAMPLE_BYTES, 8 * _SAMPLE_BYTES)
    return b"RIFF" + struct.pack("<I", riff) + b"WAVEfmt " + described + b"data" + struct.pack("<I", data)
