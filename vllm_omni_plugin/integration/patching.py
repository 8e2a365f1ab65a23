"""Replaces functions of vLLM at run time. Imports nothing of vLLM."""

from collections.abc import Callable
from functools import wraps
from inspect import getattr_static
from typing import Any

_PATCHED = "_vllm_omni_plugin_patched"


def patch_function(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a function of a module or class by `replacement`, which gets the original first. Idempotent.

    For a class method, `replacement` gets the unbound function, and then the class.
    """
    attribute = getattr_static(owner, name)
    original = attribute.__func__ if isinstance(attribute, classmethod | staticmethod) else attribute
    if hasattr(original, _PATCHED):
        return

    @wraps(original)
    def patched(*args: Any, **kwargs: Any) -> Any:
        return replacement(original, *args, **kwargs)

    setattr(patched, _PATCHED, True)
    setattr(owner, name, patched if original is attribute else type(attribute)(patched))
