"""Symbols of vLLM that this package uses on the way to engines: starting, calling, requests, outputs."""

from vllm_omni_plugin.vllm_api.symbols.symbol import Symbol

_ENGINE = "vllm.v1.engine"
_ENGINE_PROC = "vllm.v1.engine.core.EngineCoreProc"
_PARALLEL_CONFIG = "vllm.config.parallel.ParallelConfig"
_SERIAL = "vllm.v1.serial_utils"
_START = "vllm.v1.engine.utils"
_WORKER = "vllm.v1.worker.gpu_worker.Worker"
_WORKERS = "vllm.v1.executor.multiproc_executor"
_STATS_OF_STEP = "vllm.v1.metrics.stats.SchedulerStats"
_READY = f"{_ENGINE}.EngineCoreReadyResponse"
_PLACEHOLDERS = "vllm.multimodal.inputs.PlaceholderRange"
_SAMPLING = "vllm.sampling_params.SamplingParams"
_MODEL_CONFIG = "vllm.config.model.ModelConfig"

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
    Symbol("vllm.envs.VLLM_RPC_BASE_PATH", "ipc sockets lie in a folder of their process's own"),
    Symbol("vllm.envs.VLLM_ENGINE_READY_TIMEOUT_S", "how long an engine may load"),
    Symbol("vllm.platforms.current_platform.is_cpu", "decides how replicas share a node's devices", ()),
    Symbol("vllm.platforms.current_platform.is_cuda_alike", "decides how replicas share a node's devices", ()),
    Symbol("vllm.platforms.current_platform.is_xpu", "decides how replicas share a node's devices", ()),
    Symbol("vllm.utils.network_utils.get_open_zmq_ipc_path", "addresses of links and handshakes", ()),
    Symbol(f"{_PARALLEL_CONFIG}.assigned_physical_gpu_ids", "the devices of a user's choice"),
    Symbol(f"{_PARALLEL_CONFIG}._api_process_count", "how many engines share the cores of a CPU"),
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
    Symbol(f"{_WORKERS}.MultiprocExecutor", "runs an engine's workers", ("vllm_config",)),
    Symbol(f"{_WORKERS}.MultiprocExecutor.is_failed", "a worker has ended"),
    Symbol(f"{_WORKERS}.MultiprocExecutor.shutdown", "comes when a worker has ended, before the engine says so", ()),
    Symbol(f"{_WORKERS}.MultiprocExecutor.shutting_down", "has come"),
    Symbol(f"{_WORKERS}.MultiprocExecutor.workers", "their processes, and how they ended"),
    Symbol(f"{_WORKERS}.WorkerProcHandle.proc", "their processes, and how they ended"),
    Symbol(f"{_START}.CoreEngine", "one engine of a handshake", (), ("index", "local")),
    Symbol(f"{_START}.CoreEngine.identity", "the routing frame of an engine's requests"),
    Symbol(
        f"{_START}.CoreEngineLaunch",
        "what the start-up handshake waits for",
        (),
        ("engine_manager", "coordinator", "addresses", "tensor_queue"),
    ),
    Symbol(f"{_START}.EngineZmqAddresses", "the two ends of a link", (), ("inputs", "outputs")),
    Symbol(f"{_START}.EngineZmqAddresses.coordinator_input", "where a rank hears of waves"),
    Symbol(f"{_START}.EngineZmqAddresses.coordinator_output", "where a rank tells its load and of waves"),
    Symbol(f"{_START}.EngineZmqAddresses.frontend_stats_publish_address", "where front ends hear of both"),
    Symbol(
        f"{_START}.wait_for_engine_startup",
        "plays the start-up handshake",
        ("handshake_socket", "core_engines", "parallel_config", "coordinated_dp", "cache_config", "launch"),
    ),
)
"""What starts an engine."""

CACHE_EVENTS = (
    Symbol(
        "vllm.config.KVEventsConfig",
        "turns the reports of engines on",
        (),
        ("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint"),
    ),
    Symbol("vllm.config.vllm.VllmConfig.kv_events_config", "turns the reports of engines on"),
    Symbol("vllm.config.cache.CacheConfig.enable_prefix_caching", "without it there is nothing to report"),
)
"""What makes engines report what their prefix caches hold."""

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
    Symbol(f"{_ENGINE_PROC}.set_weight_version", "labels the weights of every replica", ("weight_version",)),
    Symbol(f"{_ENGINE_PROC}.sleep", "puts every replica to sleep", ("level", "mode")),
    Symbol(f"{_ENGINE_PROC}.wake_up", "wakes every replica up", ("tags",)),
    Symbol(f"{_WORKER}.start_weight_update", "a replica that starts later lacks these weights", ()),
    Symbol(f"{_WORKER}.update_weights", "a replica that starts later lacks these weights"),
    Symbol(f"{_WORKER}.finish_weight_update", "a replica that starts later lacks these weights", ()),
    Symbol(f"{_WORKER}.reload_weights", "a replica that starts later lacks these weights"),
)
"""Methods of an engine, and of its workers, that are called by name over the link."""

BALANCING = (
    Symbol(f"{_ENGINE}.EngineCoreRequest.session_id", "keeps a session at one replica"),
    Symbol(f"{_ENGINE}.EngineCoreRequest.mm_features", "names the cached blocks of a prompt"),
    Symbol("vllm.lora.request.LoRARequest.lora_name", "names the cached blocks of a prompt"),
    Symbol("vllm.multimodal.inputs.MultiModalFeatureSpec.identifier", "names the cached blocks of a prompt"),
    Symbol("vllm.multimodal.inputs.MultiModalFeatureSpec.mm_position", "names the cached blocks of a prompt"),
    Symbol(f"{_PLACEHOLDERS}.offset", "names the cached blocks of a prompt"),
    Symbol(f"{_PLACEHOLDERS}.length", "names the cached blocks of a prompt"),
    Symbol("vllm.pooling_params.PoolingParams.skip_reading_prefix_cache", "tells prompts that use no cache"),
    Symbol("vllm.v1.metrics.stats.PrefillStats.num_cached_tokens", "how much of a prompt was cached"),
    Symbol(f"{_STATS_OF_STEP}.num_waiting_reqs", "load of an engine"),
    Symbol(f"{_STATS_OF_STEP}.num_skipped_waiting_reqs", "load of an engine"),
    Symbol(f"{_STATS_OF_STEP}.num_running_reqs", "load of an engine"),
    Symbol(f"{_STATS_OF_STEP}.kv_cache_usage", "load of an engine"),
    Symbol(f"{_READY}.num_gpu_blocks", "how much an engine can cache"),
    Symbol(f"{_READY}.block_size", "names the cached blocks of a prompt"),
    Symbol(f"{_READY}.effective_attention_block_size", "names the cached blocks of a prompt"),
)
"""What load-balancing policies decide by."""

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
    Symbol(
        f"{_MODEL_CONFIG}.get_vocab_size",
        "tokens that an answer may go on from, and that simulated engines answer with",
        (),
    ),
)
"""What a request is when it goes on at another replica."""

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
