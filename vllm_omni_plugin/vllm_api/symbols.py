"""Every symbol of vLLM that this package uses, as plain data: the one list to read when a new version of vLLM appears.

Importing this module imports nothing of vLLM. The contract tests resolve each symbol in the installed version.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Symbol:
    """One thing of vLLM's that we name, read, call or replace.

    Attributes:
        path: its dotted path; the last part may be an attribute that exists on instances only.
        used_for: what would no longer work without it.
        positional: names of the parameters we pass by position, in order; None for what is not called.
        keywords: names of the parameters we pass by name.
    """

    path: str
    used_for: str
    positional: tuple[str, ...] | None = None
    keywords: tuple[str, ...] = ()


_ARG_UTILS = "vllm.engine.arg_utils"
_ASYNC_LLM = "vllm.v1.engine.async_llm.AsyncLLM"
_CLIENT = "vllm.v1.engine.core_client"
_ENGINE = "vllm.v1.engine"
_ENGINE_PROC = "vllm.v1.engine.core.EngineCoreProc"
_OUTPUT_PROCESSOR = "vllm.v1.engine.output_processor"
_PARALLEL_CONFIG = "vllm.config.parallel.ParallelConfig"
_SERIAL = "vllm.v1.serial_utils"
_START = "vllm.v1.engine.utils"
_WORKER = "vllm.v1.worker.gpu_worker.Worker"

FLAGS = (
    Symbol("vllm.plugins.load_general_plugins", "calls our entry point in every process", ()),
    Symbol(f"{_ARG_UTILS}.EngineArgs.add_cli_args", "wrapped: adds our flag group", ("parser",)),
    Symbol(f"{_ARG_UTILS}.EngineArgs.from_cli_args", "wrapped: reads and checks our flags", ("args",)),
    Symbol(f"{_ARG_UTILS}.EngineArgs.additional_config", "carries our options"),
    Symbol(f"{_ARG_UTILS}.EngineArgs._api_process_count", "tells vLLM that several engines stand behind one front end"),
    Symbol("vllm.config.vllm.VllmConfig.additional_config", "carries our options"),
    Symbol("vllm.envs.VLLM_USE_RUST_FRONTEND", "refused with our flags"),
)
"""What turns command-line arguments into a configuration."""

COMMAND = (
    Symbol("vllm.entrypoints.cli.serve.run_headless", "wrapped: runs our replica server", ("args",)),
    Symbol("vllm.entrypoints.cli.serve.validate_parsed_serve_args", "wrapped: checks our flags early", ("args",)),
    Symbol(f"{_ARG_UTILS}.AsyncEngineArgs.from_cli_args", "the configuration of a headless node", ("args",)),
    Symbol(f"{_ARG_UTILS}.EngineArgs.create_engine_config", "the configuration of a node", (), ("usage_context",)),
    Symbol(f"{_ARG_UTILS}.EngineArgs.disable_log_stats", "whether engines report statistics"),
    Symbol(
        "vllm.entrypoints.launchers.cli_args.propagate_flash_late_interaction",
        "a flag that only the command line applies",
        ("args", "engine_args"),
    ),
    Symbol("vllm.reasoning.ReasoningParserManager.import_reasoning_parser", "a flag's plugin", ("plugin_path",)),
    Symbol("vllm.usage.usage_lib.UsageContext.OPENAI_API_SERVER", "what the engines are started for"),
    Symbol("vllm.v1.executor.Executor.get_class", "what runs the workers", ("vllm_config",)),
)
"""What `vllm serve` does with `--headless`."""

DOOR = (
    Symbol(
        f"{_CLIENT}.EngineCoreClient.make_async_mp_client",
        "wrapped: AsyncLLM gets the fleet's client from it",
        ("vllm_config", "executor_class", "log_stats"),
        ("renderer",),
    ),
    Symbol("vllm.renderers.base.BaseRenderer.start_mm_warmup_in_background", "vLLM's clients start it too", ()),
    Symbol(f"{_ASYNC_LLM}.__init__", "wrapped: binds how requests fail once the output processor exists"),
    Symbol(f"{_ASYNC_LLM}.check_health", "wrapped: a fleet that cannot serve is not healthy", ()),
    Symbol(f"{_ASYNC_LLM}.engine_core", "tells a fleet's AsyncLLM from any other"),
    Symbol(f"{_ASYNC_LLM}.output_processor", "ends single requests with an error"),
    Symbol(
        f"{_OUTPUT_PROCESSOR}.OutputProcessor.abort_requests",
        "ends a request with all samples of its `n`",
        ("request_ids",),
        ("internal",),
    ),
    Symbol(f"{_OUTPUT_PROCESSOR}.OutputProcessor.request_states", "finds a request that fails"),
    Symbol(f"{_OUTPUT_PROCESSOR}.RequestState.parent_req", "finds the other samples of its `n`"),
    Symbol(f"{_OUTPUT_PROCESSOR}.RequestState.queue", "where `generate` waits for outputs"),
    Symbol("vllm.v1.engine.parallel_sampling.ParentRequest.request_id", "names all samples of an `n`"),
    Symbol(f"{_OUTPUT_PROCESSOR}.RequestOutputCollector.put", "makes `generate` raise an error", ("output",)),
    Symbol("vllm.exceptions.GracefulHTTPError", "gives an error its HTTP status", ("message", "http_status")),
    Symbol("vllm.v1.engine.exceptions.EngineDeadError", "tells AsyncLLM that it cannot serve", ()),
    Symbol(
        f"{_CLIENT}.MPClient._apply_ready_response",
        "applies what engines found at start to the configuration",
        ("payload",),
    ),
    Symbol(f"{_CLIENT}.MPClient.vllm_config", "read by `_apply_ready_response`"),
    Symbol(f"{_CLIENT}.MPClient.stats_update_address", "read by `_apply_ready_response`"),
    Symbol(f"{_CLIENT}.MPClient._effective_attention_block_sizes", "filled by `_apply_ready_response`"),
    Symbol(f"{_CLIENT}.MPClient._kv_event_sources", "filled by `_apply_ready_response`"),
)
"""What stands between AsyncLLM and the engines."""

PROTOCOL = (
    Symbol(f"{_SERIAL}.MsgpackEncoder", "encodes requests", ()),
    Symbol(f"{_SERIAL}.MsgpackEncoder.encode", "encodes requests", ("obj",)),
    Symbol(f"{_SERIAL}.MsgpackDecoder", "decodes outputs", ("t",)),
    Symbol(f"{_SERIAL}.MsgpackDecoder.decode", "decodes outputs", ("bufs",)),
    Symbol(f"{_SERIAL}.UtilityResult.result", "what an engine answers to a call"),
    Symbol(f"{_ENGINE}.EngineCoreRequestType.ADD", "type byte of a request"),
    Symbol(f"{_ENGINE}.EngineCoreRequestType.ABORT", "type byte of an abort"),
    Symbol(f"{_ENGINE}.EngineCoreRequestType.UTILITY", "type byte of a call"),
    Symbol(f"{_ENGINE_PROC}.ENGINE_CORE_DEAD", "an engine announces its own death"),
    Symbol(f"{_ENGINE}.EngineCoreRequest.request_id", "replaced by an id of the attempt's own"),
    Symbol(f"{_ENGINE}.EngineCoreRequest.client_index", "picks the output socket that answers"),
    Symbol(f"{_ENGINE}.EngineCoreRequest.resumable", "tells a streaming-input session"),
    Symbol(f"{_ENGINE}.EngineCoreRequest.abort_immediately", "tells a request that engines never answer"),
    Symbol(f"{_ENGINE}.EngineCoreRequest.sampling_params", "shown to load-balancing policies"),
    Symbol(f"{_ENGINE}.EngineCoreRequest.pooling_params", "may bind a request to one engine"),
    Symbol(
        "vllm.v1.pool.late_interaction.get_late_interaction_engine_index",
        "binds documents to the engine of their query",
        ("pooling_params", "num_engines"),
    ),
    Symbol("vllm.lora.request.LoRARequest.lora_int_id", "names an adapter in later calls"),
    Symbol(f"{_ENGINE}.EngineCoreOutputs", "an idle engine's report", (), ("engine_index", "scheduler_stats")),
    Symbol(f"{_ENGINE}.EngineCoreOutputs.engine_index", "labels vLLM's metrics; rewritten per replica"),
    Symbol(f"{_ENGINE}.EngineCoreOutputs.outputs", "outputs of requests"),
    Symbol(f"{_ENGINE}.EngineCoreOutputs.scheduler_stats", "feeds vLLM's metrics"),
    Symbol(f"{_ENGINE}.EngineCoreOutputs.utility_output", "the answer to a call"),
    Symbol(f"{_ENGINE}.EngineCoreOutput.request_id", "rewritten to the client's id"),
    Symbol(f"{_ENGINE}.EngineCoreOutput.finish_reason", "ends a request"),
    Symbol(f"{_ENGINE}.UtilityOutput.call_id", "finds who called"),
    Symbol(f"{_ENGINE}.UtilityOutput.failure_message", "a failed call"),
    Symbol(f"{_ENGINE}.UtilityOutput.result", "the result of a call"),
    Symbol(f"{_ENGINE}.FinishReason.ABORT", "ends a streaming-input session for good"),
    Symbol(f"{_ENGINE}.FinishReason.ERROR", "ends a streaming-input session for good"),
    Symbol("vllm.v1.metrics.stats.SchedulerStats", "an idle engine's report", ()),
)
"""What goes over the link to an engine."""

LAUNCH = (
    Symbol("vllm.envs.VLLM_CPU_OMP_THREADS_BIND", "cores the user has bound are not divided again"),
    Symbol("vllm.envs.VLLM_ENGINE_READY_TIMEOUT_S", "how long an engine may load"),
    Symbol("vllm.platforms.current_platform.is_cpu", "decides how replicas share a node's devices", ()),
    Symbol("vllm.platforms.current_platform.is_cuda_alike", "decides how replicas share a node's devices", ()),
    Symbol("vllm.platforms.current_platform.is_xpu", "decides how replicas share a node's devices", ()),
    Symbol("vllm.utils.network_utils.get_open_zmq_ipc_path", "addresses of links and handshakes", ()),
    Symbol(f"{_PARALLEL_CONFIG}.assigned_physical_gpu_ids", "the devices of a user's choice"),
    Symbol(f"{_PARALLEL_CONFIG}.data_parallel_rank_local", "which share of the devices a replica takes"),
    Symbol("vllm.config.vllm.VllmConfig.parallel_config", "handed to the start-up handshake"),
    Symbol("vllm.config.vllm.VllmConfig.cache_config", "handed to the start-up handshake"),
    Symbol(
        f"{_START}.set_assigned_physical_gpu_ids_for_dp_rank",
        "gives a replica its share of the devices",
        ("vllm_config", "local_dp_rank", "user_assigned_gpu_ids"),
    ),
    Symbol(
        f"{_START}.CoreEngineProcManager",
        "starts an engine process",
        (),
        (
            "local_engine_count",
            "start_index",
            "local_start_index",
            "vllm_config",
            "local_client",
            "handshake_address",
            "executor_class",
            "log_stats",
        ),
    ),
    Symbol(f"{_START}.CoreEngineProcManager.processes", "an engine's process id, its exit and its end"),
    Symbol(f"{_START}.CoreEngineProcManager.shutdown", "ends an engine", (), ("timeout",)),
    Symbol(f"{_START}.CoreEngine", "one engine of a handshake", (), ("index", "local")),
    Symbol(f"{_START}.CoreEngine.identity", "the routing frame of an engine's requests"),
    Symbol(
        f"{_START}.CoreEngineLaunch",
        "what the start-up handshake waits for",
        (),
        ("engine_manager", "coordinator", "addresses", "tensor_queue"),
    ),
    Symbol(f"{_START}.EngineZmqAddresses", "the two ends of a link", (), ("inputs", "outputs")),
    Symbol(
        f"{_START}.wait_for_engine_startup",
        "plays the start-up handshake",
        ("handshake_socket", "core_engines", "parallel_config", "coordinated_dp", "cache_config", "launch"),
    ),
)
"""What starts an engine."""

CALLS = (
    Symbol(f"{_ENGINE_PROC}.add_lora", "loads an adapter on every replica", ("lora_request",)),
    Symbol(f"{_ENGINE_PROC}.collective_rpc", "calls every worker", ("method", "timeout", "args", "kwargs")),
    Symbol(f"{_ENGINE_PROC}.compute_weight_checksums", "checksums of every worker", ()),
    Symbol(f"{_ENGINE_PROC}.get_supported_tasks", "what the model can do", ()),
    Symbol(f"{_ENGINE_PROC}.get_weight_version", "must be the same on every replica", ()),
    Symbol(f"{_ENGINE_PROC}.is_scheduler_paused", "must be the same on every replica", ()),
    Symbol(f"{_ENGINE_PROC}.is_sleeping", "must be the same on every replica", ()),
    Symbol(f"{_ENGINE_PROC}.list_loras", "the adapters that every replica has", ()),
    Symbol(f"{_ENGINE_PROC}.pause_scheduler", "pauses every replica", ("mode", "clear_cache")),
    Symbol(f"{_ENGINE_PROC}.pin_lora", "pins an adapter on every replica", ("lora_id",)),
    Symbol(
        f"{_ENGINE_PROC}.profile",
        "profiles every replica",
        ("is_start", "profile_prefix", "delay_iterations", "max_iterations"),
    ),
    Symbol(f"{_ENGINE_PROC}.release_kv_cache_memory", "frees memory of every replica", ()),
    Symbol(f"{_ENGINE_PROC}.remove_lora", "unloads an adapter on every replica", ("lora_id",)),
    Symbol(f"{_ENGINE_PROC}.reset_encoder_cache", "clears a cache of every replica", ()),
    Symbol(f"{_ENGINE_PROC}.reset_mm_cache", "clears a cache of every replica", ()),
    Symbol(
        f"{_ENGINE_PROC}.reset_prefix_cache",
        "clears a cache of every replica",
        ("reset_running_requests", "reset_connector"),
    ),
    Symbol(f"{_ENGINE_PROC}.resume_scheduler", "resumes every replica", ()),
    Symbol(f"{_ENGINE_PROC}.save_sharded_state", "saves the weights", ("path", "pattern", "max_size")),
    Symbol(f"{_ENGINE_PROC}.set_weight_version", "labels the weights of every replica", ("weight_version",)),
    Symbol(f"{_ENGINE_PROC}.sleep", "puts every replica to sleep", ("level", "mode")),
    Symbol(f"{_ENGINE_PROC}.wake_up", "wakes every replica up", ("tags",)),
    Symbol(f"{_WORKER}.start_weight_update", "a replica that starts later lacks these weights", ()),
    Symbol(f"{_WORKER}.update_weights", "a replica that starts later lacks these weights"),
    Symbol(f"{_WORKER}.finish_weight_update", "a replica that starts later lacks these weights", ()),
    Symbol(f"{_WORKER}.reload_weights", "a replica that starts later lacks these weights"),
)
"""Methods of an engine, and of its workers, that are called by name over the link."""

_AUTHENTICATION = "vllm.entrypoints.serve.middleware.authenticate.AuthenticationMiddleware"

SERVER = (
    Symbol("vllm.plugins.load_endpoint_plugins", "wrapped: our routes and middleware come with it"),
    Symbol("vllm.plugins.endpoint_plugins.interface.EndpointPlugin.attach_router", "adds our routes", ("app",)),
    Symbol(
        "vllm.plugins.endpoint_plugins.interface.EndpointPlugin.init_state",
        "tells our routes which fleet they stand before",
        ("engine_client", "state", "args"),
    ),
    Symbol(_AUTHENTICATION, "checks API keys on our routes", ("app", "tokens")),
    Symbol(f"{_AUTHENTICATION}.verify_token", "checks API keys on our routes", ("headers",)),
    Symbol("vllm.envs.VLLM_API_KEY", "the API key without `--api-key`"),
)
"""What our part of the HTTP server stands on."""

_STATS = "vllm.v1.metrics.stats"

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
    Symbol("vllm.config.model.ModelConfig.get_vocab_size", "tokens that simulated engines answer with", ()),
)
"""What simulated engines speak and are configured by."""

_SAMPLING = "vllm.sampling_params.SamplingParams"

MOVING = (
    Symbol(f"{_ENGINE}.EngineCoreRequest.prompt_embeds", "such a prompt cannot be continued by tokens"),
    Symbol("vllm.sampling_params._SAMPLING_EPS", "tells greedy sampling"),
    Symbol(f"{_SAMPLING}.temperature", "tells greedy sampling"),
    Symbol(f"{_SAMPLING}.seed", "makes an answer repeatable"),
    Symbol(f"{_SAMPLING}.presence_penalty", "looks back at the output"),
    Symbol(f"{_SAMPLING}.frequency_penalty", "looks back at the output"),
    Symbol(f"{_SAMPLING}.structured_outputs", "looks back at the output"),
    Symbol(f"{_SAMPLING}.thinking_token_budget", "looks back at the output"),
    Symbol(f"{_SAMPLING}.repetition_detection", "looks back at the output"),
    Symbol(f"{_SAMPLING}.trace_decode_token_ids", "looks back at the output"),
    Symbol(f"{_SAMPLING}.watermarking", "looks back at the output"),
    Symbol(f"{_SAMPLING}.bad_words_token_ids", "words of several tokens look back at the output"),
    Symbol(f"{_SAMPLING}.extra_args", "arguments of a third party's sampling; transfers between engines"),
    Symbol(f"{_SAMPLING}.prompt_logprobs", "delivered once"),
    Symbol(f"{_SAMPLING}.prompt_logprob_token_ids", "delivered once"),
    Symbol(f"{_SAMPLING}.prompt_logprob_start", "means nothing without the two above"),
    Symbol(f"{_SAMPLING}.skip_reading_prefix_cache", "set for the same two"),
    Symbol("vllm.config.model.ModelConfig.logits_processors", "processors of a third party look back at anything"),
    Symbol("vllm.config.model.ModelConfig.max_model_len", "bounds an answer"),
    Symbol(f"{_SAMPLING}.clone", "parameters of a built request", ()),
    Symbol(
        f"{_ENGINE}.EngineCoreRequest",
        "builds requests from tokens",
        (),
        (
            "request_id",
            "prompt_token_ids",
            "mm_features",
            "sampling_params",
            "pooling_params",
            "arrival_time",
            "lora_request",
            "cache_salt",
            "data_parallel_rank",
            "prompt_embeds",
            "resumable",
            "external_req_id",
        ),
    ),
    Symbol(
        f"{_ENGINE}.EngineCoreOutput",
        "ends a request whose last token has been delivered",
        (),
        ("request_id", "new_token_ids", "finish_reason", "stop_reason"),
    ),
    Symbol(f"{_ENGINE}.FinishReason.STOP", "ends a request whose last token has been delivered"),
    Symbol(f"{_ENGINE}.FinishReason.LENGTH", "ends a request whose last token has been delivered"),
    Symbol(f"{_ENGINE}.EngineCoreOutput.new_token_ids", "what a request goes on from"),
    Symbol(f"{_ENGINE}.EngineCoreOutput.events", "told once"),
    Symbol(f"{_ENGINE}.EngineCoreOutput.prefill_stats", "told once"),
    Symbol(f"{_ENGINE}.EngineCoreOutput.new_prompt_logprobs_tensors", "delivered once"),
    Symbol(f"{_ENGINE}.EngineCoreOutput.prompt_token_id_logprobs", "delivered once"),
    Symbol(f"{_ENGINE}.EngineCoreOutput.routed_experts", "rows of tokens delivered before are cut off"),
    Symbol(f"{_ENGINE}.EngineCoreOutput.new_logprobs", "cut with its tokens"),
    Symbol(f"{_ENGINE}.EngineCoreOutput.new_sampling_mask", "cut with its tokens"),
    Symbol("vllm.v1.outputs.LogprobsLists.slice_request", "cuts log-probabilities", ("req_idx", "num_positions")),
    Symbol("vllm.v1.outputs.SamplingMaskLists.slice_request", "cuts sampling masks", ("req_idx", "num_positions")),
)
"""What a request is when it goes on at another replica."""

_MODEL_CONFIG = "vllm.config.model.ModelConfig"
_LOGGERS = "vllm.v1.metrics.loggers"

FINGERPRINT = (
    Symbol("vllm.config.vllm.VllmConfig.model_config", "heads and replicas must agree on it"),
    Symbol("vllm.config.vllm.VllmConfig.lora_config", "heads and replicas must agree on it"),
    *(
        Symbol(f"{_MODEL_CONFIG}.{name}", "heads and replicas must agree on it")
        for name in (
            "model",
            "revision",
            "tokenizer",
            "tokenizer_mode",
            "runner_type",
            "convert_type",
            "dtype",
            "quantization",
            "logprobs_mode",
        )
    ),
    Symbol("vllm.config.lora.LoRAConfig.max_loras", "heads and replicas must agree on it"),
    Symbol("vllm.config.lora.LoRAConfig.max_lora_rank", "heads and replicas must agree on it"),
)
"""What of a configuration must be the same on a head and a replica."""

LABELS = (
    Symbol(f"{_ASYNC_LLM}.logger_manager", "knows the engines of its construction only"),
    Symbol(f"{_LOGGERS}.StatLoggerManager.engine_indexes", "grows and shrinks with the fleet"),
    Symbol(f"{_LOGGERS}.StatLoggerManager.stat_loggers", "what they keep by engine grows and shrinks with the fleet"),
    Symbol(f"{_LOGGERS}.PrometheusStatLogger.vllm_config", "configures the loggers of engines that join"),
    Symbol(f"{_LOGGERS}.StatLoggerBase", "a logger of one engine", ("vllm_config", "engine_index")),
    Symbol(f"{_ENGINE}.EngineCoreOutputs.timestamp", "told in our clock"),
    Symbol(f"{_ENGINE}.EngineCoreEvent.timestamp", "told in our clock"),
)
"""What vLLM's metrics keep by engine."""

SYMBOLS = (*FLAGS, *COMMAND, *DOOR, *SERVER, *PROTOCOL, *LAUNCH, *CALLS, *SIMULATION, *MOVING, *FINGERPRINT, *LABELS)
"""All of them."""
