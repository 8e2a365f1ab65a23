"""The way to a policy, which may be a third party's: whatever is wrong with it, no request is lost by that."""

from collections.abc import Callable
from operator import index
from typing import Any

from vllm_omni_plugin.balancing import (
    DecidingBalancer,
    Decision,
    LoadBalancer,
    ServingReplicas,
    Task,
)
from vllm_omni_plugin.errors import NoExplanationError
from vllm_omni_plugin.logger import init_logger

logger = init_logger(__name__)

UNEXPLAINED = "unexplained"
"""The reason of all decisions of a policy that only selects."""
POLICY_FAULT = "policy-fault"
"""The fallback where a policy raised or answered nonsense."""
_HOOKS = ("dispatched", "dispatch_cancelled", "began", "ended", "replica_lost", "cache_cleared", "cache_changed")


class PolicyGuard:
    """Asks a policy, checks its answers, and tells it what it wants to be told.

    Args:
        balancer: the policy. Which methods of `PolicyHooks` it has is found out here, once.
        name: what users know it by; its class's name by default.

    Attributes:
        name: as above.
        follows_caches: whether it takes what engines report of their caches.
        wants_cache_events: whether this head's own engines shall report that.
    """

    def __init__(self, balancer: LoadBalancer, name: str = "") -> None:
        self.name = name or type(balancer).__name__
        self.wants_cache_events = bool(getattr(balancer, "wants_cache_events", False))
        self._explains = isinstance(balancer, DecidingBalancer)
        self._ask = balancer.decide if isinstance(balancer, DecidingBalancer) else _explainless(balancer)
        self._hooks = {name: getattr(balancer, name) for name in _HOOKS if hasattr(balancer, name)}
        self.follows_caches = "cache_changed" in self._hooks
        self._warned: set[str] = set()

    def decide(self, task: Task, replicas: ServingReplicas[Any]) -> Decision:
        """Its decision, or that for a shortest queue in place of one that cannot be carried out."""
        try:
            decision = self._ask(task, replicas)
            flaw = _flaw(decision, len(replicas))
        except Exception as error:
            flaw = f"raised {error!r}"
        if not flaw:
            return decision
        self._warn("decide", f"{flaw}; such requests go to the shortest queue instead")
        shortest = min(range(len(replicas)), key=lambda place: replicas[place].queue_length)
        return Decision(shortest, "least-load", fallback=POLICY_FAULT, by_policy=False)

    def explain(self, task: Task, replicas: ServingReplicas[Any]) -> Decision:
        """Its decision, which is not carried out.

        Raises:
            NoExplanationError: it cannot say, or what it says cannot be carried out.
        """
        if not self._explains:
            raise NoExplanationError(f"Policy {self.name} cannot explain its decisions: it has no method `decide`.")
        try:
            decision = self._ask(task, replicas)
            flaw = _flaw(decision, len(replicas))
        except Exception as error:
            raise NoExplanationError(f"Policy {self.name} raised {error!r}.") from error
        if flaw:
            raise NoExplanationError(f"Policy {self.name} {flaw}.")
        return decision

    def notify(self, name: str, *args: object) -> None:
        """Tell it something, if it wants to know.

        Args:
            name: the method of `PolicyHooks`.
            args: its arguments.
        """
        hook = self._hooks.get(name)
        if hook is None:
            return
        try:
            hook(*args)
        except Exception as error:
            self._warn(name, f"raised {error!r} in `{name}` and may decide worse from here on")

    def _warn(self, where: str, what: str) -> None:
        if where not in self._warned:
            self._warned.add(where)
            logger.error("Load-balancing policy %s %s. This is said once.", self.name, what)


def _explainless(balancer: LoadBalancer) -> Callable[[Task, ServingReplicas[Any]], Decision]:
    return lambda task, replicas: Decision(balancer.select(task, replicas), UNEXPLAINED)


def _flaw(decision: object, replicas: int) -> str:
    """What of a decision would break those who carry it out, count it or show it; "" if nothing."""
    if not isinstance(decision, Decision):
        return f"answered {decision!r}, which is no Decision"
    if not 0 <= index(decision.position) < replicas:
        return f"chose {decision.position!r} of {replicas} replicas"
    if not (
        isinstance(decision.reason, str) and isinstance(decision.fallback, str) and index(decision.matched_tokens) >= 0
    ):
        return f"answered {decision!r}, whose fields cannot be used"
    return ""
