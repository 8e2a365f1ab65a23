"""Turns codec tokens into audio."""
# torch is not annotated for strict checks.
# mypy: disallow-subclassing-any=False

from collections.abc import Sequence
from typing import Any

import torch

from vllm_omni_plugin.pipeline import StageOutput
from vllm_omni_plugin.stages import PythonStage, StageJob

_HARMONICS = (0.5, 0.25, 0.125)
"""Amplitudes of a code's tone and of its harmonics; their sum is below 1, so that no sample clips."""
_LOWEST_HZ = 100


class CodecDecoder(torch.nn.Module):
    """Plays a tone for each code, cross-faded into the next one.

    Weighted overlap-add: a code is two hops of sound under a Hann window, whose halves add up to 1 where two codes
    overlap. A tone has a whole number of periods in a hop, so that a repeated code sounds without a break.

    Args:
        codes: size of the codec's vocabulary.
        sample_rate: in hertz.
        hop: samples between the starts of two codes.
    """

    def __init__(self, codes: int, sample_rate: int, hop: int) -> None:
        super().__init__()
        self.hop = hop
        time = torch.arange(2 * hop) / sample_rate
        period_hz = sample_rate / hop
        frequencies = period_hz * (_LOWEST_HZ // period_hz + torch.arange(codes) % 40)[:, None]
        tones = [
            level * torch.sin(2 * torch.pi * order * frequencies * time)
            for order, level in enumerate(_HARMONICS, start=1)
        ]
        window = torch.hann_window(2 * hop)
        self.frames = torch.nn.Embedding.from_pretrained(sum(tones, torch.zeros(())) * window)

    def forward(self, codes: torch.Tensor, tail: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return samples in -1..1, `[codes * hop]`, and the tail of the last code, `[hop]`.

        Args:
            codes: `[codes]`.
            tail: tail of the previous code, `[hop]`.
        """
        rises, falls = self.frames(codes).split(self.hop, dim=1)
        tails = torch.cat([tail[None], falls])
        return (rises + tails[:-1]).flatten(), tails[-1]


class Vocoder(PythonStage):
    """Returns the audio of codec tokens, chunk by chunk; the chunks together equal the audio of the whole.

    Args:
        first_code: the upstream model's token for code 0.
        codes: size of the codec's vocabulary.
        sample_rate: in hertz.
        device: for computing.
    """

    def __init__(self, *, first_code: int, codes: int, sample_rate: int = 24_000, device: str) -> None:
        super().__init__(device=device)
        self._first_code = first_code
        self._codes = codes
        self._sample_rate = sample_rate

    def start(self) -> None:
        self._decoder = CodecDecoder(self._codes, self._sample_rate, hop=self._sample_rate // 50).to(self.device)

    def compute(self, jobs: Sequence[StageJob]) -> list[StageOutput | Exception]:
        with torch.inference_mode():
            return [self._sound(job) for job in jobs]

    def _sound(self, job: StageJob) -> StageOutput | Exception:
        codes = torch.tensor(list(job.input.token_ids or ()), dtype=torch.long, device=self.device) - self._first_code
        if ((codes < 0) | (codes >= self._codes)).any():
            return ValueError(f"{(codes + self._first_code).tolist()} are not all codec tokens")
        samples, tail = self._decoder(codes, self._tail(job.memory))
        job.memory["tail"] = tail
        if job.last:
            samples = torch.cat([samples, tail])
        return StageOutput(tensor=samples.cpu(), metadata={"sample_rate": self._sample_rate})

    def _tail(self, memory: dict[str, Any]) -> torch.Tensor:
        silence = torch.zeros(self._decoder.hop, device=self.device)
        return memory.get("tail", silence)
