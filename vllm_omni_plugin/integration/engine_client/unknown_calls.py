"""What a vLLM of another version asks of an engine client and this version of the plugin does not know."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from vllm_omni_plugin.errors import OmniError


class UnknownCallError(OmniError, AttributeError, NotImplementedError):
    """vLLM asks for something that this version of the plugin does not know.

    An `AttributeError`, so that vLLM may look whether there is such a method.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"vLLM {version('vllm')} asks the fleet for {name!r}, which vllm-omni-plugin {version('vllm-omni-plugin')} "
            "does not know. Please use them in versions that go together."
        )


class RefusesUnknownCalls:
    """Base of an engine client that has vLLM's methods without vLLM's base class, which has each of them and raises a
    bare `NotImplementedError`: what is not there raises `UnknownCallError`."""

    # For mypy, what is not there is an error.
    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            if hasattr(type(self), name):
                # A property of ours has raised, and what it raises is to be seen.
                return object.__getattribute__(self, name)
            if name.startswith("_"):
                raise AttributeError(name)
            raise UnknownCallError(name)
