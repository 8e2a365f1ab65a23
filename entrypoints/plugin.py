"""Entry point of the group `vllm.general_plugins`, called once in every process that vLLM starts."""

import sys


def register() -> None:
    """Add our flags to vLLM's, in a process that parses any. Idempotent; opens nothing and imports nothing heavy.

    Engine and worker processes call this too. They take their configuration from the head and parse no flags, so there
    vLLM's argument module is not imported, and there is nothing to add to.
    """
    arg_utils = sys.modules.get("vllm.engine.arg_utils")
    if arg_utils is None:
        return
    from vllm_omni_plugin.integration.flags import add_omni_flags

    add_omni_flags(arg_utils)
