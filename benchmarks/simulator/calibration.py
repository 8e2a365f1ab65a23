"""Fits service times to measurements."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Measurement(NamedTuple):
    """The mean length of iterations of one kind.

    Attributes:
        prefill_tokens: prompt tokens per iteration.
        decoding: sequences that get a token.
    """

    prefill_tokens: int
    decoding: int
    seconds: float


class ServiceTimes(NamedTuple):
    """The coefficients of `EngineSettings`, and the error of the fit.

    Attributes:
        step_s: seconds of every iteration.
        prefill_token_s: seconds per prompt token.
        sequence_s: seconds per decoding sequence.
        error: root mean square of the relative errors.
    """

    step_s: float
    prefill_token_s: float
    sequence_s: float
    error: float


def fit(measurements: Sequence[Measurement]) -> ServiceTimes:
    """Least squares of the relative errors, so that short iterations count as much as long ones.

    Raises:
        ValueError: the measurements do not determine the three coefficients, or one would not be above 0.
    """
    seconds = np.array([each.seconds for each in measurements])
    rows = np.array([[1.0, each.prefill_tokens, each.decoding] for each in measurements])
    weighted = rows / seconds[:, np.newaxis]
    solution, _, rank, _ = np.linalg.lstsq(weighted, np.ones(len(measurements)), rcond=None)
    if rank < rows.shape[1]:
        raise ValueError("measure prompts of several lengths and several numbers of sequences")
    if (solution <= 0).any():
        raise ValueError(
            f"service times must be above 0, the fit gives {solution.tolist()}: measure on a quiet machine"
        )
    error = float(np.sqrt(np.mean((weighted @ solution - 1) ** 2)))
    step_s, prefill_token_s, sequence_s = solution.tolist()
    return ServiceTimes(step_s, prefill_token_s, sequence_s, error)
