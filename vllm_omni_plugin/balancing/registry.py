"""Finds a policy by its name, and checks its name and options at start."""

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from functools import cache, partial
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from types import MappingProxyType
from typing import Any

from vllm_omni_plugin.balancing.interface import LoadBalancer, LoadBalancingPolicy
from vllm_omni_plugin.balancing.policies.least_queue_length import LeastQueueLengthBalancer
from vllm_omni_plugin.balancing.policies.least_tokens import LeastTokensBalancer
from vllm_omni_plugin.balancing.policies.prefix_policy import KvAwareBalancer, PrefixBalancer
from vllm_omni_plugin.balancing.policies.random_policy import RandomBalancer
from vllm_omni_plugin.balancing.policies.round_robin import RoundRobinBalancer
from vllm_omni_plugin.balancing.policies.session import SessionBalancer
from vllm_omni_plugin.errors import ConfigError, did_you_mean

ENTRY_POINT_GROUP = "vllm_omni_plugin.lb_policies"
_NO_OPTION = "rng"
"""By convention the argument for a source of randomness, in tests and simulations; it is not an option."""

_RENAMED_HOOKS = {
    "dispatched": "assigned",
    "dispatch_cancelled": "assignment_cancelled",
    "forgotten": "replica_lost",
    "cleared": "cache_cleared",
}
"""Hooks of version 0.1, and what they are called now: under the old names they are never called."""

_REMOVED = {"power-of-two": "least-queue-length", "cost-aware": "least-tokens"}
"""Policies of version 0.1 that are no more, and what to use instead."""

_BUILT_IN: Mapping[str, type[LoadBalancer]] = MappingProxyType(
    {
        LoadBalancingPolicy.RANDOM: RandomBalancer,
        LoadBalancingPolicy.ROUND_ROBIN: RoundRobinBalancer,
        LoadBalancingPolicy.LEAST_QUEUE_LENGTH: LeastQueueLengthBalancer,
        LoadBalancingPolicy.LEAST_TOKENS: LeastTokensBalancer,
        LoadBalancingPolicy.SESSION: SessionBalancer,
        LoadBalancingPolicy.PREFIX: PrefixBalancer,
        LoadBalancingPolicy.KV_AWARE: KvAwareBalancer,
    }
)


@cache
def installed_policies() -> EntryPoints:
    """The entry points of all installed packages. Cached, since it reads a file of each package."""
    return entry_points(group=ENTRY_POINT_GROUP)


def known_policies() -> list[str]:
    """Names of built-in policies, followed by installed ones. Loads no third-party code."""
    installed = installed_policies().names
    return [*map(str, _BUILT_IN), *sorted(installed - _BUILT_IN.keys())]


def build_load_balancer_factory(
    policy: str | LoadBalancingPolicy, options: Mapping[str, Any] | None = None
) -> Callable[[], LoadBalancer]:
    """Return a factory of balancers. Balancers keep state, so every stage pool needs its own.

    `policy` is a built-in policy, the name of an entry point of the group `vllm_omni_plugin.lb_policies`, or
    `package.module:Class`; `options` are keyword arguments of its constructor. It is built once here as a check, which
    raises ConfigError.
    """
    name = str(policy)
    offender = f"load balancing policy {name!r}"
    if ":" in name:
        policy_class = _load_policy(offender, partial(pkgutil.resolve_name, name))
    elif entry_point := _installed(name):
        offender = f"{offender} ({entry_point.value}, installed by {_distribution(entry_point)})"
        policy_class = _load_policy(offender, entry_point.load)
    elif name in _BUILT_IN:
        policy_class = _BUILT_IN[name]
    elif name in _REMOVED:
        raise ConfigError(f"{offender} was removed: use {_REMOVED[name]}")
    else:
        known = known_policies()
        usage = f"use one of {', '.join(known)}, or package.module:Class"
        raise ConfigError(f"unknown load balancing policy {name!r}{did_you_mean(name, known)}: {usage}")
    return _checked_factory(offender, policy_class, options or {})


def _installed(name: str) -> EntryPoint | None:
    """The entry point of this name, None without one. Raises ConfigError if the name is ambiguous."""
    found = list(installed_policies().select(name=name))
    providers = ["vllm-omni-plugin (built-in)"] if name in _BUILT_IN else []
    providers += [_distribution(entry_point) for entry_point in found]
    if found and len(providers) > 1:
        raise ConfigError(
            f"load balancing policy {name!r} is provided more than once, by {' and '.join(providers)}: "
            "uninstall or rename all but one, or give the class as package.module:Class"
        )
    return found[0] if found else None


def _distribution(entry_point: EntryPoint) -> str:
    return entry_point.dist.name if entry_point.dist else "an unnamed distribution"


def _load_policy(offender: str, load: Callable[[], object]) -> type[LoadBalancer]:
    """Import a policy's class; refused if it has no `select`, or hooks under their former names."""
    # Third-party code may raise any exception.
    try:
        target = load()
    except Exception as error:
        raise ConfigError(
            f"{offender} cannot be imported ({error!r}): install its package or correct the name"
        ) from error
    if not isinstance(target, type):
        raise ConfigError(f"{offender} is not a class: name a class with a method select(task, replicas)")
    if not callable(getattr(target, "select", None)):
        raise ConfigError(f"{offender} has no method select(task, replicas): add it or name another class")
    for old, new in _RENAMED_HOOKS.items():
        if old in vars(target) and new not in vars(target):
            raise ConfigError(f"{offender} has a hook {old}, which is called {new} now: rename the method")
    return target


def _checked_factory(
    offender: str, policy: type[LoadBalancer], options: Mapping[str, Any]
) -> Callable[[], LoadBalancer]:
    """Build the policy once, so that wrong options end the start instead of the first request."""
    _refuse_unknown(offender, policy, options)
    build = partial(policy, **options) if options else policy
    # Third-party code may raise any exception.
    try:
        build()
    except ConfigError as error:
        raise ConfigError(f"{offender}: {error}") from error
    except Exception as error:
        if options:
            raise ConfigError(f"{offender} cannot be built with the options {dict(options)} ({error!r})") from error
        raise ConfigError(f"{offender} cannot be built without arguments ({error!r}): give them defaults") from error
    return build


def _refuse_unknown(offender: str, policy: type[LoadBalancer], options: Mapping[str, Any]) -> None:
    accepted = _accepted(policy)
    unknown = [name for name in options if accepted is not None and name not in accepted]
    if unknown and accepted:
        hint = did_you_mean(unknown[0], accepted)
        raise ConfigError(f"{offender}: unknown option {unknown[0]!r}{hint}: use {', '.join(accepted)}")
    if unknown:
        raise ConfigError(f"{offender}: unknown option {unknown[0]!r}: it has no options")


def _accepted(policy: type[LoadBalancer]) -> list[str] | None:
    """The names of a policy's options; None if its signature does not tell them."""
    try:
        parameters = inspect.signature(policy).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in by_name and parameter.name != _NO_OPTION]
