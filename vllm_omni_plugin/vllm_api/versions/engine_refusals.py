"""What an engine that is paused says to a request that it does not take."""

from typing import Any

from vllm_omni_plugin.vllm_api.versions.differences import PAUSE_REFUSES


def is_refusal(output: Any) -> bool:
    """Whether an `EngineCoreOutput` says that the engine has not taken the request, which may be sent again."""
    return PAUSE_REFUSES.here and output.error is not None and bool(output.error.retryable)
