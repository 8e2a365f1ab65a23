"""How functions of vLLM's come to do more. Imports nothing of vLLM."""

from collections.abc import Callable
from functools import wraps
from inspect import getattr_static
from typing import Any

_EXTENDED = "_vllm_omni_plugin_extended"


def patch_function(owner: Any, name: str, extension: Callable[..., Any]) -> None:
    """Call `extension` in place of a function of vLLM's from now on, with that function in front. Idempotent.

    Args:
        owner: the module or class that has it.
        name: its name. If it is a class method, the extension gets it without its class, and then the class.
    """
    held = getattr_static(owner, name)
    own = held.__func__ if isinstance(held, classmethod | staticmethod) else held
    if hasattr(own, _EXTENDED):
        return

    @wraps(own)
    def extended(*args: Any, **kwargs: Any) -> Any:
        return extension(own, *args, **kwargs)

    setattr(extended, _EXTENDED, True)
    setattr(owner, name, extended if own is held else type(held)(extended))
