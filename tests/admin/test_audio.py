"""Audio of a stage as bytes."""

from typing import Any

import pytest

from vllm_omni_plugin.admin.answers.stage_results import DEFAULT_SAMPLE_RATE, sample_rate, wav
from vllm_omni_plugin.errors import StageError
from vllm_omni_plugin.pipeline import StageOutput


@pytest.mark.parametrize("rate", [0, -1, 2**31, 24000.0, "24000", None], ids=repr)
def test_an_impossible_sample_rate_is_an_error_of_the_stage(rate: Any) -> None:
    with pytest.raises(StageError, match=f"Stage 'vocoder': its sample_rate is {rate!r}"):
        sample_rate("vocoder", StageOutput(metadata={"sample_rate": rate}))


@pytest.mark.parametrize(("metadata", "rate"), [({}, DEFAULT_SAMPLE_RATE), ({"sample_rate": 2**31 - 1}, 2**31 - 1)])
def test_every_other_rate_fits_into_a_wav_header(metadata: dict[str, int], rate: int) -> None:
    told = sample_rate("vocoder", StageOutput(metadata=metadata))
    assert told == rate
    assert wav(b"", told)[24:28] == rate.to_bytes(4, "little")
