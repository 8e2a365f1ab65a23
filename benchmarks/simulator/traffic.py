"""Pieces that workloads are made of: tokens, lengths and arrivals."""

import random
from array import array
from collections.abc import Iterator
from math import log, sin, tau

from simulator.requests import Request
from vllm_omni_plugin.admission import RequestTerms

_TOKEN_BYTES = 4
_DAY_S = 24 * 3600.0


def tokens(rng: random.Random, count: int) -> "array[int]":
    """Random token ids; no two calls give the same beginning but by design."""
    drawn = array("I")
    drawn.frombytes(rng.randbytes(_TOKEN_BYTES * count))
    return drawn


def length(rng: random.Random, mean: float, sigma: float, limit: int) -> int:
    """A log-normal length of this mean and shape, 1 to `limit`."""
    return max(1, min(limit, round(rng.lognormvariate(log(mean) - sigma * sigma / 2, sigma))))


def poisson(rng: random.Random, rate: float) -> Iterator[float]:
    """Times of arrivals that know nothing of each other."""
    now = 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def bursts(rng: random.Random, rate: float, period_s: float, share: float, factor: float) -> Iterator[float]:
    """Times of arrivals whose rate is `factor` times the mean in the first `share` of every period."""
    quiet = (1 - share * factor) / (1 - share)
    for arrival in poisson(rng, rate * factor):
        in_burst = arrival % period_s < share * period_s
        if in_burst or rng.random() < quiet / factor:
            yield arrival


def daily(rng: random.Random, rate: float) -> Iterator[float]:
    """Times of arrivals whose rate goes up and down by 80% with the hours of the day."""
    for arrival in poisson(rng, rate * 1.8):
        if rng.random() * 1.8 < 1 + 0.8 * sin(tau * arrival / _DAY_S):
            yield arrival


class Requests:
    """Makes requests with numbers.

    Args:
        rng: source of what they consist of.
        terms: of their clients.
        first: number before the first one's.
    """

    def __init__(self, rng: random.Random, terms: RequestTerms | None = None, first: int = 0) -> None:
        self._rng = rng
        self._terms = terms or RequestTerms()
        self._number = first

    def make(self, prompt: "array[int]", output_tokens: int, limit: int, session: str | None = None) -> Request:
        """The next request, with an answer of so many tokens."""
        self._number += 1
        return Request(self._number, prompt, tokens(self._rng, output_tokens), limit, session, self._terms)
