"""Entry point of the group `vllm.general_plugins`, called once in every process that vLLM starts."""

import os
import sys

from vllm_omni_plugin.config import FLEET_ENGINE


def register() -> None:
    """Add our flags to vLLM's, in a process that parses any. Idempotent; opens nothing and imports nothing heavy.

    Engine and worker processes call this too. They take their configuration from the head and parse no flags, so there
    vLLM's argument module is not imported, and there is nothing to add to. Those of a fleet ask for what their
    processor needs.

    A command line with `--omni` is for another package: vLLM hands it to `vllm_omni`, which adds flags of the same
    names as ours, and leaves their values where ours would be.
    """
    if FLEET_ENGINE in os.environ:
        from vllm_omni_plugin.vllm_api.launch.amx import request_amx

        request_amx()
    arg_utils = sys.modules.get("vllm.engine.arg_utils")
    if arg_utils is None or "--omni" in sys.argv:
        return
    from vllm_omni_plugin.integration.flags import add_omni_flags

    add_omni_flags(arg_utils)
