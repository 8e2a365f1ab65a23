"""The results of one run."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from simulator.replica import SimReplica
from simulator.requests import Request

SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Summary:
    """The figures of a run.

    Attributes:
        ttft: seconds to the first token, at the quantiles `SHARES`.
        latency: seconds to the last token, at the quantiles `SHARES`.
        requests_per_s: answered ones, from the first arrival to the last answer.
        hit_rate: share of the prompt tokens that came from a cache.
        spread: coefficient of variation of the replicas' busy shares.
        refused: share of requests without a complete answer.
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
        refused: requests without a complete answer.
        ttfts: seconds to the first token, in order of completion.
        latencies: seconds to the last token, in order of completion.
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
        self._busy_shares = [replica.busy_s / replica.present_s for replica in replicas if replica.present_s]

    def summary(self) -> Summary:
        """At least one request must have been answered."""
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
