"""Entry point of the group `vllm.general_plugins`, called once in every process that vLLM starts."""

import os
import sys

from vllm_omni_plugin.config import FLEET_ENGINE


def register() -> None:
    """Add our flags to vLLM's parser, if this process has imported it. Idempotent; imports nothing heavy.

    Engine and worker processes call this function too. They parse no flags; those of a fleet request what their CPU
    needs. A command line with `--omni` belongs to the package `vllm_omni`, which has flags of the same names.
    """
    if FLEET_ENGINE in os.environ:
        from vllm_omni_plugin.vllm_api.launch.amx import request_amx

        request_amx()
    arg_utils = sys.modules.get("vllm.engine.arg_utils")
    if arg_utils is None or "--omni" in sys.argv:
        return
    from vllm_omni_plugin.integration.flags import add_omni_flags

    add_omni_flags(arg_utils)
