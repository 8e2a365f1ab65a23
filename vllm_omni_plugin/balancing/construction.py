"""From the class of a policy and its options to what builds it."""

import inspect
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from functools import partial
from typing import Any

from vllm_omni_plugin.balancing.base import LoadBalancer
from vllm_omni_plugin.errors import ConfigError

_NO_OPTION = "rng"
"""By convention the source of randomness, for tests and simulations; no value of a configuration can be one."""


def checked_factory(
    offender: str, policy: type[LoadBalancer], options: Mapping[str, Any]
) -> Callable[[], LoadBalancer]:
    """Return what builds the policy with these options, after building it once to see that it can be.

    Args:
        offender: how messages name the policy.
        policy: its class.
        options: arguments of its constructor, by name.

    Raises:
        ConfigError: it has no such option, or refuses a value, or cannot be built.
    """
    _refuse_unknown(offender, policy, options)
    build = partial(policy, **options) if options else policy
    # Third-party code may raise anything; whatever it is, it means that this policy cannot be used like this.
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
    if accepted is None:
        return
    for name in options:
        if name in accepted:
            continue
        if not accepted:
            raise ConfigError(f"{offender}: unknown option {name!r}: it has no options")
        close = get_close_matches(name, accepted, n=1)
        suggestion = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(f"{offender}: unknown option {name!r}{suggestion}: use {', '.join(accepted)}")


def _accepted(policy: type[LoadBalancer]) -> list[str] | None:
    """The names of a policy's options; None if only its constructor knows them."""
    try:
        parameters = inspect.signature(policy).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return None
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [parameter.name for parameter in parameters if parameter.kind in by_name and parameter.name != _NO_OPTION]
