"""Symbols of vLLM that this package uses where vLLM calls it: command line, AsyncLLM, HTTP server, metrics, traces."""

from vllm_omni_plugin.vllm_api.symbols.symbol import Symbol

_ARG_UTILS = "vllm.engine.arg_utils"
_ASYNC_LLM = "vllm.v1.engine.async_llm.AsyncLLM"
_CLIENT = "vllm.v1.engine.core_client"
_ENGINE = "vllm.v1.engine"
_OUTPUT_PROCESSOR = "vllm.v1.engine.output_processor"
_CHAT = "vllm.entrypoints.openai.chat_completion"
_COMPLETION = "vllm.entrypoints.openai.completion"
_SERVING = "vllm.entrypoints.generate.base.serving"
_MODELS = "vllm.entrypoints.openai.models.serving.OpenAIServingModels"
_AUTHENTICATION = "vllm.entrypoints.serve.middleware.authenticate.AuthenticationMiddleware"
_LOGGERS = "vllm.v1.metrics.loggers"

FLAGS = (
    Symbol("vllm.plugins.load_general_plugins", "calls our entry point in every process", ()),
    Symbol(f"{_ARG_UTILS}.EngineArgs.add_cli_args", "wrapped: adds our flag group", ("parser",)),
    Symbol(f"{_ARG_UTILS}.EngineArgs.from_cli_args", "wrapped: reads and checks our flags", ("args",)),
    Symbol(f"{_ARG_UTILS}.EngineArgs.additional_config", "carries our options"),
    Symbol(f"{_ARG_UTILS}.EngineArgs._api_process_count", "tells vLLM that several engines stand behind one front end"),
    Symbol("vllm.config.vllm.VllmConfig.additional_config", "carries our options"),
    Symbol("vllm.envs.VLLM_DP_SIZE", "refused with our flags"),
    Symbol("vllm.envs.VLLM_USE_RUST_FRONTEND", "refused with our flags"),
)
"""What turns command-line arguments into a configuration."""

COMMAND = (
    Symbol("vllm.entrypoints.cli.serve.run_headless", "wrapped: runs our replica server", ("args",)),
    Symbol("vllm.entrypoints.cli.serve.run_multi_api_server", "wrapped: runs our supervisor", ("args",)),
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

SEVERAL_SERVERS = (
    Symbol(
        "vllm.entrypoints.launchers.api_server.entry.setup_server", "binds the HTTP socket", ("args",), ("reuse_port",)
    ),
    Symbol(f"{_ARG_UTILS}.EngineArgs._api_process_rank", "tells the supervisor's configuration from a server's"),
    Symbol(f"{_ARG_UTILS}.EngineArgs.shutdown_timeout", "how long API servers may take to end"),
    Symbol("vllm.utils.network_utils.get_ip", "where replicas listen whose coordinator listens everywhere", ()),
    Symbol("vllm.v1.engine.admission_control.SharedAdmissionStats.COUNTERS_PER_SLOT", "clears those of a dead server"),
    Symbol(
        "vllm.v1.engine.admission_control.SharedAdmissionStats.num_counters", "sizes their memory", ("client_count",)
    ),
    Symbol("vllm.v1.metrics.prometheus.setup_multiprocess_prometheus", "where API servers count", ()),
    Symbol(
        "vllm.v1.utils.run_api_server_worker_proc",
        "what an API server process runs",
        ("listen_address", "sock", "args", "client_config"),
    ),
)
"""What `vllm serve` does with `--api-server-count`."""

ENGINE_CLIENT = (
    Symbol(
        f"{_CLIENT}.EngineCoreClient.make_async_mp_client",
        "wrapped: AsyncLLM gets the fleet's client from it",
        ("vllm_config", "executor_class", "log_stats"),
        ("renderer",),
    ),
    Symbol("vllm.renderers.base.BaseRenderer.start_mm_warmup_in_background", "vLLM's clients start it too", ()),
    Symbol(f"{_ASYNC_LLM}.__init__", "wrapped: binds how requests fail once the output processor exists"),
    Symbol(f"{_ASYNC_LLM}.check_health", "wrapped: a fleet that cannot serve is not healthy", ()),
    Symbol(f"{_ASYNC_LLM}.shutdown", "wrapped: what makes answers stays open while requests finish", (), ("timeout",)),
    Symbol(f"{_ASYNC_LLM}.engine_core", "tells a fleet's AsyncLLM from any other"),
    Symbol(f"{_ASYNC_LLM}.output_processor", "ends single requests with an error"),
    Symbol(
        f"{_OUTPUT_PROCESSOR}.OutputProcessor.abort_requests",
        "ends a request with all samples of its `n`",
        ("request_ids",),
        ("internal",),
    ),
    Symbol(f"{_OUTPUT_PROCESSOR}.OutputProcessor.request_states", "finds a request that fails, or is left in the end"),
    Symbol(
        f"{_OUTPUT_PROCESSOR}.OutputProcessor.process_outputs",
        "wrapped: an output that it raises over fails its request alone",
        ("engine_core_outputs",),
    ),
    Symbol(f"{_OUTPUT_PROCESSOR}.OutputProcessorOutput.reqs_to_abort", "completed where one of the outputs failed"),
    Symbol(f"{_OUTPUT_PROCESSOR}.OutputProcessor.has_unfinished_requests", "whether all have been answered", ()),
    Symbol(
        f"{_OUTPUT_PROCESSOR}.OutputProcessor.add_request",
        "wrapped: an answer in another model's tokens is read without the prompt's",
        ("request", "prompt"),
    ),
    Symbol(f"{_OUTPUT_PROCESSOR}.OutputProcessor.tokenizer", "replaced by that of the model which answers"),
    Symbol(f"{_OUTPUT_PROCESSOR}.RequestState.detokenizer", "replaced by one that knows no prompt"),
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
    Symbol(
        "vllm.entrypoints.generate.base.serving.GenerateBaseServing._get_session_id",
        "wrapped: OpenAI's `user` stands in for a session",
        ("request", "raw_request"),
    ),
    Symbol(
        "vllm.entrypoints.openai.completion.protocol.CompletionRequest",
        "what an explained prompt is read as",
        (),
        ("prompt", "max_tokens"),
    ),
    Symbol(
        "vllm.renderers.online_renderer.OnlineRenderer.render_completion",
        "tokenises an explained prompt",
        ("request",),
        ("skip_mm_cache",),
    ),
    Symbol("vllm.exceptions.VLLMClientError", "a prompt that cannot be completed"),
    Symbol("vllm.entrypoints.serve.engine.protocol.ErrorResponse.error", "a prompt that cannot be completed"),
    Symbol(f"{_MODELS}.is_base_model", "tells names of the model from those of adapters", ("model_name",)),
    Symbol(f"{_MODELS}.lora_requests", "the adapters that prompts may name"),
    Symbol(f"{_MODELS}.lora_id_counter", "replaced: ids that no other server gives"),
    Symbol(f"{_MODELS}.static_lora_modules", "given one by one, without what the fleet has loaded"),
    Symbol(f"{_MODELS}.init_static_loras", "wrapped: the names of other heads' adapters come first", ()),
    Symbol(f"{_MODELS}.unload_lora_adapter", "wrapped: other heads forget the adapter, too", ("request",)),
    Symbol(
        "vllm.lora.request.LoRARequest",
        "an adapter in vLLM's registry",
        (),
        ("lora_name", "lora_int_id", "lora_path", "base_model_name", "load_inplace", "is_3d_lora_weight"),
    ),
)
"""What our part of the HTTP server stands on."""

ANSWERS = (
    Symbol(f"{_CHAT}.serving.OpenAIServingChat.create_chat_completion", "wrapped: answers", ("request", "raw_request")),
    Symbol(
        f"{_COMPLETION}.serving.OpenAIServingCompletion.create_completion",
        "wrapped: answers, and takes the texts to be spoken",
        ("request", "raw_request"),
    ),
    Symbol(f"{_CHAT}.protocol.OpenAIChatCompletionAudio", "an answer's audio"),
    Symbol(f"{_CHAT}.protocol.ChatMessage.audio", "an answer's audio"),
    Symbol(
        f"{_SERVING}.GenerateBaseServing.create_error_response",
        "words refusals",
        ("message",),
        ("param",),
    ),
    Symbol(f"{_SERVING}.GenerateBaseServing.create_streaming_error_response", "words errors of streams", ("message",)),
    Symbol("vllm.entrypoints.serve.engine.protocol.ErrorResponse", "tells refusals from answers"),
    Symbol("vllm.entrypoints.serve.utils.api_utils.load_aware_call", "counts requests for speech", ("func",)),
    Symbol(
        "vllm.entrypoints.serve.utils.api_utils.validate_json_request", "checks requests for speech", ("raw_request",)
    ),
    Symbol(
        "vllm.entrypoints.serve.utils.api_utils.with_cancellation",
        "ends requests of clients that left",
        ("handler_func",),
    ),
    Symbol(f"{_MODELS}.model_name", "the model's name in streams", ("lora_request",)),
)
"""What the answers of a pipeline stand on."""

TRACING = (
    Symbol(
        f"{_OUTPUT_PROCESSOR}.OutputProcessor.do_tracing",
        "wrapped: makes the span of a request, to which we add",
        ("engine_core_output", "req_state", "iteration_stats"),
    ),
    Symbol(f"{_OUTPUT_PROCESSOR}.OutputProcessor.tracing_enabled", "whether requests have spans"),
)
"""What tells in traces where requests went."""

LABELS = (
    Symbol(f"{_ASYNC_LLM}.logger_manager", "knows the engines of its construction only"),
    Symbol(f"{_LOGGERS}.StatLoggerManager.engine_indexes", "grows and shrinks with the fleet"),
    Symbol(
        f"{_LOGGERS}.StatLoggerManager.record",
        "wrapped: statistics that cannot be counted are left out",
        (),
        ("scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
    ),
    Symbol(
        f"{_LOGGERS}.StatLoggerManager.record_sleep_state",
        "told of sleep that came by another server",
        ("sleep", "level"),
    ),
    Symbol(f"{_LOGGERS}.StatLoggerManager.stat_loggers", "what they keep by engine grows and shrinks with the fleet"),
    Symbol(f"{_LOGGERS}.PrometheusStatLogger.vllm_config", "configures the loggers of engines that join"),
    Symbol(f"{_LOGGERS}.StatLoggerBase", "a logger of one engine", ("vllm_config", "engine_index")),
    Symbol(f"{_ENGINE}.EngineCoreOutputs.timestamp", "told in our clock"),
    Symbol(f"{_ENGINE}.EngineCoreEvent.timestamp", "told in our clock"),
)
"""What vLLM's metrics keep by engine."""
