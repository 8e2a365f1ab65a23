"""What a vLLM of another version asks of an engine client and this version of the plugin does not know."""

from abc import update_abstractmethods
from collections.abc import Callable
from functools import wraps
from importlib.metadata import version
from inspect import iscoroutinefunction, isfunction
from typing import Any, TypeVar

from vllm_omni_plugin.errors import OmniError

_Client = TypeVar("_Client", bound=type)


class UnknownCallError(OmniError, AttributeError, NotImplementedError):
    """vLLM asks for something that this version of the plugin does not know.

    An `AttributeError`, so that vLLM may look whether there is such a method.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"vLLM {version('vllm')} asks the fleet for {name!r}, which vllm-omni-plugin {version('vllm-omni-plugin')} "
            "does not know. Please use them in versions that go together."
        )


def refuse_unknown_calls(client: _Client) -> _Client:
    """Let a class of engine clients raise `UnknownCallError` for each method that neither it nor its base implements.

    The base class of vLLM's clients has every method and raises a bare `NotImplementedError` in most of them. What it
    does implement is inherited.
    """
    for base in client.__mro__[1:]:
        for name, member in vars(base).items():
            if not name.startswith("_") and isfunction(member) and getattr(client, name) is member:
                setattr(client, name, _refusing(name, member))
    setattr(client, "__getattr__", _no_such_attribute)  # noqa: B010 - a type has no such attribute for mypy
    # A later vLLM may have abstract methods that nobody calls before the server serves.
    update_abstractmethods(client)
    return client


def _refusing(name: str, inherited: Callable[..., Any]) -> Callable[..., Any]:
    if getattr(inherited, "__isabstractmethod__", False):

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise UnknownCallError(name)

        return call

    @wraps(inherited)
    def call_inherited(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return inherited(self, *args, **kwargs)
        except NotImplementedError:
            raise UnknownCallError(name) from None

    @wraps(inherited)
    async def await_inherited(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await inherited(self, *args, **kwargs)
        except NotImplementedError:
            raise UnknownCallError(name) from None

    return await_inherited if iscoroutinefunction(inherited) else call_inherited


def _no_such_attribute(self: Any, name: str) -> Any:
    if hasattr(type(self), name):
        # A property of ours has raised, and what it raises is to be seen.
        return object.__getattribute__(self, name)
    if name.startswith("_"):
        raise AttributeError(name)
    raise UnknownCallError(name)
