"""Calls a policy, which may be a third party's: no fault of it loses a request.

It may raise more than an `Exception`: SystemExit, or what a panic of Rust code raises.
"""

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
"""The reason of all decisions of a policy that has no method `decide`."""
POLICY_FAULT = "policy-fault"
"""The fallback after an error or an invalid answer of the policy."""
_HOOKS = ("assigned", "assignment_cancelled", "began", "ended", "replica_lost", "cache_cleared", "cache_changed")


class PolicyGuard:
    """Asks a policy, checks its answers, and notifies it through the methods of `PolicyHooks` that it has.

    The name, for users, is that of its class by default. If it `wants_cache_events`, this head's engines report them.
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
        """The policy's decision, or the shortest queue if the policy fails."""
        try:
            decision = self._ask(task, replicas)
            flaw = _why_invalid(decision, len(replicas))
        except BaseException as error:
            flaw = f"raised {error!r}"
        if not flaw:
            return decision
        self._warn("decide", f"{flaw}; such requests go to the shortest queue instead")
        lengths = replicas.queue_lengths
        return Decision(lengths.index(min(lengths)), "least-load", fallback=POLICY_FAULT, by_policy=False)

    def explain(self, task: Task, replicas: ServingReplicas[Any]) -> Decision:
        """The policy's decision, without carrying it out. Raises NoExplanationError if it gives no valid one."""
        if not self._explains:
            raise NoExplanationError(f"Policy {self.name} cannot explain its decisions: it has no method `decide`.")
        try:
            decision = self._ask(task, replicas)
            flaw = _why_invalid(decision, len(replicas))
        except BaseException as error:
            raise NoExplanationError(f"Policy {self.name} raised {error!r}.") from error
        if flaw:
            raise NoExplanationError(f"Policy {self.name} {flaw}.")
        return decision

    def notify(self, name: str, *args: object) -> None:
        """Call a method of `PolicyHooks`, if the policy has it."""
        hook = self._hooks.get(name)
        if hook is None:
            return
        try:
            hook(*args)
        except BaseException as error:
            self._warn(name, f"raised {error!r} in `{name}` and may decide worse from now on")

    def _warn(self, where: str, what: str) -> None:
        if where not in self._warned:
            self._warned.add(where)
            logger.error("Load-balancing policy %s %s. Further errors of this kind are not logged.", self.name, what)


def _explainless(balancer: LoadBalancer) -> Callable[[Task, ServingReplicas[Any]], Decision]:
    return lambda task, replicas: Decision(balancer.select(task, replicas), UNEXPLAINED)


def _why_invalid(decision: object, replicas: int) -> str:
    """Why a decision is invalid; "" if it is valid."""
    if not isinstance(decision, Decision):
        return f"returned {decision!r}, which is no Decision"
    if not 0 <= index(decision.position) < replicas:
        return f"chose {decision.position!r} of {replicas} replicas"
    if not (
        isinstance(decision.reason, str) and isinstance(decision.fallback, str) and index(decision.matched_tokens) >= 0
    ):
        return f"returned {decision!r}, whose fields are invalid"
    return ""
