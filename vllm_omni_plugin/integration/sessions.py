"""Which session a request belongs to, where it does not say so in vLLM's own ways."""

from functools import wraps
from typing import Any

_OPEN = "_vllm_omni_plugin_sessions"


def open_sessions() -> None:
    """Make vLLM's server take OpenAI's `user` for the session of a request that names none. Idempotent."""
    from vllm.entrypoints.generate.base.serving import GenerateBaseServing

    own_get = GenerateBaseServing._get_session_id
    if hasattr(own_get, _OPEN):
        return

    @wraps(own_get)
    def get_session_id(request: Any, raw_request: Any) -> str | None:
        return own_get(request, raw_request) or getattr(request, "user", None) or None

    setattr(get_session_id, _OPEN, True)
    GenerateBaseServing._get_session_id = staticmethod(get_session_id)
