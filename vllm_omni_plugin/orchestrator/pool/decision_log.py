"""Why requests went where they went, in the log: a sample, since all of them would be too many to read or to write."""

from collections.abc import Sequence
from heapq import nsmallest

from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember

logger = init_logger(__name__)

_MAX_CANDIDATES = 8
"""Candidates that a line names, the best ones."""


class DecisionLog:
    """Logs the first decision and every so manyth one after it. For whoever finds `logger` enabled for DEBUG.

    Args:
        policy: what decides, by its name.
        every: decisions from one line to the next.
    """

    def __init__(self, policy: str, every: int = 100) -> None:
        self._policy = policy
        self._every = every
        self._noted = 0

    def note(self, decision: Decision, replicas: Sequence[PoolMember], request_id: str) -> None:
        """A request goes to `replicas[decision.position]`."""
        if self._noted % self._every == 0:
            logger.debug("Request %s goes to replica %s", request_id, self._told(decision, replicas))
        self._noted += 1

    def _told(self, decision: Decision, replicas: Sequence[PoolMember]) -> str:
        return (
            f"{replicas[decision.position].name}: policy {self._policy}, reason {decision.reason}, "
            f"fallback {decision.fallback or 'none'}, candidates {_compared(decision, replicas)}"
        )


def _compared(decision: Decision, replicas: Sequence[PoolMember]) -> str:
    # Nobody has checked these before, and no request may be lost by a third party's.
    try:
        best = nsmallest(_MAX_CANDIDATES, decision.candidates, key=lambda candidate: candidate.score)
        told = [
            f"{replicas[candidate.position].name}={candidate.score:.4g} ({candidate.matched_tokens} tokens matched)"
            for candidate in best
        ]
        more = len(decision.candidates) - len(best)
    except Exception as error:
        return f"that cannot be told ({error!r})"
    return (", ".join(told) or "none") + (f" and {more} more" if more else "")
