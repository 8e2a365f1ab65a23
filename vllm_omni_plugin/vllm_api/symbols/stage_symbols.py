"""Symbols of vLLM that the stages of pipelines use: their prompts, parameters and texts."""

from vllm_omni_plugin.vllm_api.symbols.symbol import Symbol

_CONFIG = "vllm.config.model.ModelConfig"
_DETOKENIZER = "vllm.v1.engine.detokenizer.IncrementalDetokenizer"
_PROCESSOR = "vllm.v1.engine.input_processor.InputProcessor"
_REQUEST = "vllm.v1.engine.EngineCoreRequest"
_OUTPUT = "vllm.v1.engine.EngineCoreOutput"
_RENDERER = "vllm.renderers.base.BaseRenderer"
_SAMPLING = "vllm.sampling_params.SamplingParams"
_STRUCTURED = "vllm.sampling_params.StructuredOutputsParams"
_POOLING = "vllm.pooling_params.PoolingParams"
_TOKENIZER = "vllm.tokenizers.protocol.TokenizerLike"
_CARRIED = "carried over from the client's request"
_READ_ANEW = "read anew for the tokenizer of the stage that answers"
_REFUSED = "refused where it is about tokens of another model"

PROMPTS = (
    Symbol(_PROCESSOR, "checks and completes the requests of stages", ("vllm_config",)),
    Symbol(
        f"{_PROCESSOR}.process_inputs",
        "checks and completes the requests of stages",
        ("request_id", "prompt", "params", "supported_tasks"),
        ("arrival_time", "trace_headers", "priority", "resumable", "session_id"),
    ),
    Symbol(f"{_PROCESSOR}.renderer", "tokenises text for a stage"),
    Symbol(f"{_PROCESSOR}.tokenizer", "of a stage"),
    Symbol(f"{_RENDERER}.model_config", "of a stage"),
    Symbol(f"{_RENDERER}.default_cmpl_tok_params", "how a model's prompts are tokenised"),
    Symbol("vllm.renderers.params.TokenizeParams", "how a model's prompts are tokenised", ("max_total_tokens",)),
    Symbol("vllm.renderers.params.TokenizeParams.add_special_tokens", "how a model's prompts are tokenised"),
    Symbol(f"{_RENDERER}.render_cmpl", "tokenises text for a stage", ("prompts", "tok_params")),
    Symbol("vllm.inputs.TextPrompt", "text for a stage"),
    Symbol("vllm.inputs.TokensPrompt", "text for a stage, with the tokens that it is"),
    Symbol("vllm.inputs.tokens_input", "tokens for a stage", ("prompt_token_ids",), ("cache_salt",)),
    Symbol(
        "vllm.inputs.embeds_input",
        "embeddings for a stage",
        ("prompt_embeds",),
        ("cache_salt", "prompt_token_ids", "is_token_ids"),
    ),
    Symbol("vllm.tasks.GENERATION_TASKS", "what a generating stage is asked for"),
    Symbol(f"{_CONFIG}.enable_prompt_embeds", "whether a stage takes embeddings"),
    Symbol(f"{_CONFIG}.get_inputs_embeds_size", "the width of embeddings", ()),
    Symbol(f"{_CONFIG}.architectures", "what a pooling model is asked for by default"),
    Symbol(f"{_CONFIG}.pooler_config", "what a pooling model is asked for by default"),
    Symbol("vllm.config.pooler.PoolerConfig.task", "what a pooling model is asked for by default"),
    *(
        Symbol(f"{_REQUEST}.{name}", _CARRIED)
        for name in ("arrival_time", "priority", "trace_headers", "external_req_id", "params", "prompt_is_token_ids")
    ),
)
"""What makes a stage's prompt."""

TOKENIZERS = (
    Symbol("vllm.tokenizers.hf.__name__", "where the wrappers of tokenizers come from"),
    Symbol("vllm.tokenizers.hf.TokenizersBackend", "tokenizers whose library alone makes tokens"),
    Symbol("vllm.tokenizers.hf.TokenizersBackend.split_special_tokens", "tokenizers whose library alone makes tokens"),
    Symbol("vllm.tokenizers.cached_tokenizer_from_config", "the tokenizer of the entry stage", ("model_config",)),
    Symbol("vllm.tokenizers.maybe_make_thread_pool", "tokenizers are used by several threads", ("tokenizer",)),
    Symbol(f"{_TOKENIZER}.get_vocab", "tells whether two stages share their tokens", ()),
    Symbol(f"{_TOKENIZER}.eos_token_id", "must not end the answers of another model"),
    Symbol(f"{_CONFIG}.try_get_generation_config", "tokens that end answers", ()),
    Symbol(f"{_CONFIG}.tokenizer_revision", "tells whether two stages run the same model"),
    Symbol(f"{_CONFIG}.trust_remote_code", "tells whether two stages run the same model"),
)
"""What turns text into tokens and back."""

PARAMETERS = (
    Symbol("vllm.sampling_params.SamplingParams", "sampling parameters of stages", (), ("max_tokens",)),
    Symbol(f"{_SAMPLING}.__post_init__", "what follows from parameters that were laid over others", ()),
    Symbol(f"{_SAMPLING}.detokenize", "only stages of text stop at strings"),
    Symbol(f"{_SAMPLING}.skip_clone", "parameters of one request are not copied again"),
    Symbol(f"{_SAMPLING}.include_stop_str_in_output", "whether a stop token is part of what a stage puts out"),
    Symbol(_POOLING, "pooling parameters of stages", (), ("task", "use_activation", "dimensions")),
    Symbol(f"{_POOLING}.task", "an engine dies of one that its model does not know"),
    Symbol(f"{_POOLING}.step_tag_id", "a parameter of stages"),
    Symbol(f"{_POOLING}.returned_token_ids", "a parameter of stages"),
    Symbol(f"{_SAMPLING}._all_stop_token_ids", _READ_ANEW),
    Symbol(f"{_SAMPLING}._bad_words_token_ids", _READ_ANEW),
    Symbol(f"{_STRUCTURED}._backend", _READ_ANEW),
    Symbol(f"{_STRUCTURED}._backend_was_auto", _READ_ANEW),
    Symbol(f"{_SAMPLING}.logit_bias", _REFUSED),
    Symbol(f"{_SAMPLING}.logprob_token_ids", _REFUSED),
    *(
        Symbol(f"{_SAMPLING}.{name}", "no parameter of a stage")
        for name in ("n", "output_kind", "output_text_buffer_length", "stream_interval")
    ),
)
"""What stages sample and pool by."""

TEXTS = (
    Symbol(f"{_DETOKENIZER}.from_new_request", "makes text of tokens", ("tokenizer", "request")),
    Symbol(f"{_DETOKENIZER}.num_output_tokens", "makes text of tokens", ()),
    Symbol(f"{_DETOKENIZER}.output_token_ids", "the tokens up to a stop string"),
    Symbol(f"{_DETOKENIZER}.update", "makes text of tokens", ("new_token_ids", "stop_terminated")),
    Symbol(f"{_DETOKENIZER}.get_next_output_text", "makes text of tokens", ("finished",), ("delta",)),
    Symbol(f"{_OUTPUT}.pooling_output", "what pooling stages put out"),
    Symbol(f"{_OUTPUT}.kv_transfer_params", "where a prefill stage has left a KV cache"),
)
"""What reads the outputs of stages."""

STAGES = (*PROMPTS, *TOKENIZERS, *PARAMETERS, *TEXTS)
"""All of them."""
