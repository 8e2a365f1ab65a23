"""What a run is judged by."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.replica import SimReplica
from simulator.requests import Request

SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Summary:
    """A run in a few numbers.

    Attributes:
        ttft: seconds to the first token, at the quantiles `SHARES`.
        latency: seconds to the last token, at the quantiles `SHARES`.
        mean_ttft: seconds.
        mean_latency: seconds.
        requests_per_s: answered, from the first arrival to the last answer.
        hit_rate: share of the prompt tokens that came from a cache.
        spread: coefficient of variation of the share of time in which replicas were busy.
        refused: share of requests that were not answered, or not to the end.
        answered: number of requests.
    """

    ttft: tuple[float, ...]
    latency: tuple[float, ...]
    mean_ttft: float
    mean_latency: float
    requests_per_s: float
    hit_rate: float
    spread: float
    refused: float
    answered: int


class Metrics:
    """Collects the results of one run.

    Attributes:
        refused: requests without an answer, or with a part of one.
        ttfts: seconds to the first token, in the order of the answers' ends.
        latencies: seconds to the last token, in the same order.
    """

    def __init__(self) -> None:
        self.refused = 0
        self.ttfts = array("d")
        self.latencies = array("d")
        self._prompt_tokens = 0
        self._cached_tokens = 0
        self._first_arrival = 0.0
        self._last_end = 0.0
        self._busy_shares: list[float] = []

    def answered(self, request: Request) -> None:
        """A request has got its last token."""
        assert request.first_token is not None
        assert request.finished is not None
        if not self.ttfts:
            self._first_arrival = request.arrived
        self.ttfts.append(request.first_token - request.arrived)
        self.latencies.append(request.finished - request.arrived)
        self._prompt_tokens += request.prompt_tokens
        self._cached_tokens += min(request.cached_tokens, request.prompt_tokens)
        self._last_end = request.finished

    def end(self, replicas: Sequence[SimReplica]) -> None:
        """The run is over."""
        self._busy_shares = [replica.busy_s / replica.present_s for replica in replicas if replica.present_s]

    def summary(self) -> Summary:
        """All of it. At least one request must have been answered."""
        busy = np.array(self._busy_shares)
        answered = len(self.ttfts)
        ttfts, latencies = np.asarray(self.ttfts), np.asarray(self.latencies)
        return Summary(
            ttft=tuple(np.quantile(ttfts, SHARES).tolist()),
            latency=tuple(np.quantile(latencies, SHARES).tolist()),
            mean_ttft=float(ttfts.mean()),
            mean_latency=float(latencies.mean()),
            requests_per_s=answered / (self._last_end - self._first_arrival),
            hit_rate=self._cached_tokens / self._prompt_tokens,
            spread=float(busy.std() / busy.mean()),
            refused=self.refused / (answered + self.refused),
            answered=answered,
        )
