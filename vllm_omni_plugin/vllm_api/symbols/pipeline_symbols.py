"""Symbols of vLLM that read and configure the stages of a pipeline's file."""

from vllm_omni_plugin.vllm_api.symbols.symbol import Symbol

_ARG_UTILS = "vllm.engine.arg_utils"
_MODEL = "vllm.config.model.ModelConfig"
_PARSER = "vllm.utils.argparse_utils.FlexibleArgumentParser"

PIPELINES = (
    Symbol(f"{_ARG_UTILS}.FlexibleArgumentParser", "the class of the parser whose command line may name no model"),
    Symbol(f"{_PARSER}.parse_args", "wrapped: reads a command line without a model", ("args", "namespace")),
    Symbol(f"{_PARSER}.load_config_file", "tells whether a --config file names a pipeline", ("file_path",)),
    Symbol(f"{_PARSER}._option_string_actions", "the flags of engines"),
    Symbol(f"{_ARG_UTILS}.AsyncEngineArgs.model", "the model of a command line without one"),
    Symbol(f"{_MODEL}.override_generation_config", "the server's defaults of sampling"),
    Symbol(f"{_MODEL}.get_diff_sampling_param", "what sampling a model comes with", ()),
    Symbol(
        "vllm.platforms.current_platform.device_id_to_physical_device_id",
        "gives stages devices of their own",
        ("device_id",),
    ),
    Symbol("vllm.config.parallel.ParallelConfig.world_size", "how many devices an engine takes"),
)
"""What turns a pipeline's file into configurations."""
