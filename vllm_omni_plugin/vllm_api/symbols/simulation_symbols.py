"""Symbols of vLLM that stand-ins for engines and models use."""

from vllm_omni_plugin.vllm_api.symbols.symbol import Symbol

_ENGINE = "vllm.v1.engine"
_SERIAL = "vllm.v1.serial_utils"
_STATS = "vllm.v1.metrics.stats"
_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
_SPEC = "vllm.v1.kv_cache_interface.FullAttentionSpec"
_BACKEND_UTILS = "vllm.v1.attention.backends.utils"

SIMULATION = (
    Symbol("vllm.__version__", "simulated engines say it when they are ready"),
    Symbol("vllm.entrypoints.launchers.cli_args.make_arg_parser", "parses the arguments of simulations", ("parser",)),
    Symbol(
        "vllm.utils.argparse_utils.FlexibleArgumentParser",
        "parses the arguments of simulations",
        (),
        ("prog", "description", "epilog"),
    ),
    Symbol(f"{_ENGINE}.EngineCoreReadyResponse", "what simulated engines say when they are ready"),
    Symbol(f"{_ENGINE}.EngineCoreEvent", "times of simulated requests", ("type", "timestamp")),
    Symbol(f"{_ENGINE}.EngineCoreEventType.QUEUED", "times of simulated requests"),
    Symbol(f"{_ENGINE}.EngineCoreEventType.SCHEDULED", "times of simulated requests"),
    Symbol(f"{_ENGINE}.EngineCoreRequest.prompt_token_ids", "what simulated engines answer to"),
    Symbol(f"{_ENGINE}.EngineCoreRequest.lora_request", "changes what simulated engines answer"),
    Symbol(f"{_ENGINE}.EngineCoreRequest.cache_salt", "separates prompts in simulated prefix caches"),
    Symbol("vllm.sampling_params.SamplingParams.max_tokens", "ends simulated answers"),
    Symbol("vllm.sampling_params.SamplingParams.min_tokens", "ends simulated answers"),
    Symbol("vllm.sampling_params.SamplingParams.stop_token_ids", "ends simulated answers"),
    Symbol("vllm.sampling_params.SamplingParams.eos_token_id", "ends simulated answers"),
    Symbol("vllm.sampling_params.SamplingParams.allowed_token_ids", "restricts simulated answers"),
    Symbol(
        f"{_STATS}.PrefillStats.set",
        "cached tokens of simulated requests",
        ("num_prompt_tokens",),
        ("num_local_cached_tokens", "num_external_cached_tokens"),
    ),
    Symbol(f"{_STATS}.PrefixCacheStats", "hits in simulated prefix caches", (), ("requests", "queries", "hits")),
    Symbol(f"{_SERIAL}.UtilityResult", "what simulated engines answer to calls", ("r",)),
)
"""What simulated engines speak and are configured by."""

EXECUTOR = (
    Symbol(f"{_EXECUTOR}._init_executor", "replaced: there is no worker to load a model", ()),
    Symbol(f"{_EXECUTOR}.supports_async_scheduling", "replaced: iterations do not overlap", ()),
    Symbol(f"{_EXECUTOR}.driver_worker", "what calls to workers arrive at"),
    Symbol(f"{_EXECUTOR}.execute_dummy_batch", "what a rank computes because another one has requests", ()),
    *(
        Symbol(f"vllm.v1.core.sched.output.{name}", "what an iteration computes")
        for name in (
            "SchedulerOutput.scheduled_new_reqs",
            "SchedulerOutput.scheduled_cached_reqs",
            "SchedulerOutput.num_scheduled_tokens",
            "SchedulerOutput.finished_req_ids",
            "NewRequestData.req_id",
            "NewRequestData.prompt_token_ids",
            "NewRequestData.sampling_params",
            "NewRequestData.lora_request",
            "NewRequestData.num_computed_tokens",
            "CachedRequestData.req_ids",
            "CachedRequestData.num_computed_tokens",
        )
    ),
    Symbol(
        "vllm.v1.outputs.ModelRunnerOutput",
        "what an iteration brings",
        (),
        ("req_ids", "req_id_to_index", "sampled_token_ids"),
    ),
    Symbol(_SPEC, "what vLLM plans blocks by", (), ("block_size", "num_kv_heads", "head_size", "dtype")),
    Symbol(f"{_SPEC}.page_size_bytes", "what a block takes"),
    Symbol("vllm.v1.worker.worker_base.CompilationTimes", "what a worker answers", (), ("language_model", "encoder")),
    Symbol(f"{_BACKEND_UTILS}.record_kv_cache_layout", "what a worker does", ("cache_config", "layout_name")),
)
"""What an executor without a model replaces and speaks."""
