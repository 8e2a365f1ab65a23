"""Service times from measurements."""

import pytest
from simulator.calibration import Measurement, fit

from vllm_omni_plugin.sim import EngineSettings


def measured(prefill_tokens: int, decoding: int) -> Measurement:
    """What an engine with the default settings takes."""
    return Measurement(prefill_tokens, decoding, EngineSettings().duration(prefill_tokens, decoding))


def test_the_times_of_a_linear_engine_are_found() -> None:
    times = fit([measured(100, 0), measured(1000, 0), measured(0, 1), measured(0, 32)])
    usual = EngineSettings()
    assert times.step_s == pytest.approx(usual.step_s)
    assert times.prefill_token_s == pytest.approx(usual.prefill_token_s)
    assert times.sequence_s == pytest.approx(usual.sequence_s)
    assert times.error == pytest.approx(0, abs=1e-9)


def test_measurements_that_do_not_determine_the_times_are_refused() -> None:
    with pytest.raises(ValueError, match="several lengths"):
        fit([measured(100, 0), measured(0, 1)])


def test_negative_times_are_refused() -> None:
    with pytest.raises(ValueError, match="above 0"):
        fit(
            [Measurement(100, 0, 0.010), Measurement(200, 0, 0.005), Measurement(0, 1, 0.010), Measurement(0, 2, 0.011)]
        )
