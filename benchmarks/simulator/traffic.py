"""The building blocks of workloads: tokens, lengths and arrivals."""

import random
from array import array
from collections.abc import Iterator
from math import log, sin, tau

from simulator.requests import Request
from vllm_omni_plugin.admission import RequestTerms

_TOKEN_BYTES = 4
_DAY_S = 24 * 3600.0


def tokens(rng: random.Random, count: int) -> "array[int]":
    """Random token ids. Two calls never start with the same tokens in practice."""
    drawn = array("I")
    drawn.frombytes(rng.randbytes(_TOKEN_BYTES * count))
    return drawn


def length(rng: random.Random, mean: float, sigma: float, limit: int) -> int:
    """A log-normal length of this mean and shape, 1 to `limit`."""
    return max(1, min(limit, round(rng.lognormvariate(log(mean) - sigma * sigma / 2, sigma))))


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Arrival times of a Poisson process."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def bursts(rng: random.Random, rate: float, period_s: float, share: float, factor: float) -> Iterator[float]:
    """Arrival times with `factor` times the mean rate in the first `share` of every period."""
    quiet = (1 - share * factor) / (1 - share)
    for arrival in poisson(rng, rate * factor):
        in_burst = arrival % period_s < share * period_s
        if in_burst or rng.random() < quiet / factor:
            yield arrival


def daily(rng: random.Random, rate: float) -> Iterator[float]:
    """Arrival times whose rate varies by 80% over the day."""
    for arrival in poisson(rng, rate * 1.8):
        if rng.random() * 1.8 < 1 + 0.8 * sin(tau * arrival / _DAY_S):
            yield arrival


class Requests:
    """Makes numbered requests.

    Args:
        first: the first request gets the next number.
    """

    def __init__(self, rng: random.Random, terms: RequestTerms | None = None, first: int = 0) -> None:
        self._rng = rng
        self._terms = terms or RequestTerms()
        self._number = first

    def make(self, prompt: "array[int]", output_tokens: int, limit: int, session: str | None = None) -> Request:
        self._number += 1
        return Request(self._number, prompt, tokens(self._rng, output_tokens), limit, session, self._terms)
