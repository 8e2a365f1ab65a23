"""vLLM's parser of the arguments of `vllm serve`, and what it makes of some of them."""

from vllm_omni_plugin.vllm_api.versions.differences import CLI_ARGS_MOVED

if CLI_ARGS_MOVED.here:
    from vllm.entrypoints.common.cli_args import make_arg_parser, propagate_flash_late_interaction
else:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, propagate_flash_late_interaction

__all__ = ["make_arg_parser", "propagate_flash_late_interaction"]
