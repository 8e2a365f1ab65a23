"""Builds the requests of a stage that vLLM's engines run, and reads its outputs."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from vllm.inputs import embeds_input, tokens_input
from vllm.sampling_params import SamplingParams
from vllm.tasks import GENERATION_TASKS
from vllm.tokenizers import hf
from vllm.v1.engine.input_processor import InputProcessor

from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.pipeline import BuiltInTransform, Modality, PipelineError, Stage, StageInput, StageOutput
from vllm_omni_plugin.pipeline.transfer import WHOLE, InputPart
from vllm_omni_plugin.vllm_api.engine_messages.request_building import build_engine_core_request_from_tokens
from vllm_omni_plugin.vllm_api.vllm_stages.stage_api import StageApi
from vllm_omni_plugin.vllm_api.vllm_stages.stage_params import INVALID, KV_TRANSFER_PARAMS, StageParams
from vllm_omni_plugin.vllm_api.vllm_stages.stage_prompts import NO_EMBEDDINGS, StagePrompts, length_of
from vllm_omni_plugin.vllm_api.vllm_stages.stage_text import TextReader, TokenReader, Vocabulary

NIXL_LEASE_S = 30
"""NIXL's default. An engine that a decode asks later has given the memory to other prompts, and does not notice."""
_GENERATED = (Modality.TEXT, Modality.TOKENS, Modality.KV_CACHE)
_POOLED = (Modality.SCORES, Modality.EMBEDDING, Modality.LATENT)


class VllmStageApi(StageApi):
    """A stage that vLLM's engines run. Its requests go through vLLM's own input processing.

    The methods that build requests, `prompt_text` and `encode` are thread-safe. The maximum length in the configuration
    may change when engines start. `entry_config` is that of the stage whose model reads the prompts of clients. Raises
    PipelineError if the stage's engines cannot do what its file says.
    """

    def __init__(self, vllm_config: Any, entry_config: Any, stage: Stage, custom_processors: bool = False) -> None:
        self._config = vllm_config.model_config
        super().__init__(custom_processors, vocabulary=self._config.get_vocab_size())
        self._stage = stage
        self._is_pooling = self._config.runner_type == "pooling"
        self._lora = vllm_config.lora_config
        self._transfers = vllm_config.kv_transfer_config
        self._processor = InputProcessor(vllm_config)
        self._prompts = StagePrompts(self._processor.renderer, fed=bool(stage.inputs))
        self._check_stage()
        self._params = StageParams(stage, self._config)
        self._tasks: tuple[str, ...] = (self._params.task,) if self._params.task else GENERATION_TASKS
        self._vocabulary = Vocabulary(self.tokenizer, self._config, entry_config.model_config)
        self._entry_config = entry_config.model_config
        self._check_sampling()

    @property
    def tokenizer(self) -> Any:
        return self._processor.tokenizer

    @property
    def pooling_task(self) -> str | None:
        return self._params.task

    @property
    def end_token(self) -> int:
        """The token that ends an answer; 0 if the tokenizer has none, since the last token is never shown."""
        token: int | None = self.tokenizer.eos_token_id
        return 0 if token is None else token

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, without special tokens around it or for their names in it, which no answer would show."""
        literal = {"split_special_tokens": True} if isinstance(self.tokenizer, hf.TokenizersBackend) else {}
        return list(self.tokenizer.encode(text, add_special_tokens=False, **literal))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, without special tokens."""
        return str(self.tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def prompt_text(self, source: Any) -> str:
        """The prompt of a client's request as text; "" if it has none."""
        return self._vocabulary.prompt_text(source.prompt_token_ids)

    def check_answerable(self, source: Any) -> None:
        """Does nothing: `build` refuses what the model cannot answer."""

    def build(
        self, source: Any, given: StageInput, sampling: Mapping[str, Any], *, for_client: bool, part: InputPart = WHOLE
    ) -> Any:
        """A stage's request for what its transform returned; invalid input fails with a reason."""
        try:
            prompt = self._prompts.make(given, source.cache_salt)
            if part.resumable and prompt["type"] == "embeds":
                raise ValueError("a stage that works on chunks does not take embeddings")
            over = {**given.sampling, **sampling}
            params = self._client_params(source, over, part.resumable) if for_client else self._params.of_stage(over)
            request = self._processed(source, prompt, params, part)
        except INVALID as error:
            raise self._refusal(error) from error
        # A session of chunks is replayed. Some engines sample each turn by its own seed.
        return self.with_seed(request) if part.resumable else request

    def build_root(self, source: Any, sampling: Mapping[str, Any], *, for_client: bool) -> Any:
        """A first stage's request: the client's own, or its text for another model."""
        if for_client and not sampling and self._config is self._entry_config:
            return source
        if not self._vocabulary.same_model:
            text = StageInput(text=self.prompt_text(source))
            return self.build(source, text, sampling, for_client=for_client)
        if source.lora_request is not None and self._lora is None:
            raise StageInputError(f"Stage {self._stage.name!r}: it runs without LoRA adapters (--enable-lora).")
        try:
            of_client, of_stage = self._params.of_client, self._params.of_stage
            params = of_client(source.params, sampling, chunked=False) if for_client else of_stage(sampling)
            made = self._processed(source, _prompt_of(source), params)
        except INVALID as error:
            raise self._refusal(error) from error
        return msgspec.structs.replace(source, sampling_params=made.sampling_params, pooling_params=made.pooling_params)

    def build_end(self, source: Any) -> Any:
        # As in vLLM's own closing request, this token does not become part of the session.
        params = self._params.of_stage({})
        return self._processed(source, tokens_input([0]), params)

    @property
    def cache_lease_s(self) -> float:
        options = {} if self._transfers is None else self._transfers.kv_connector_extra_config
        # Half of it: engines count from an earlier time, and the decode's may be late.
        return float(options.get("kv_lease_duration", NIXL_LEASE_S)) / 2

    def with_kv_transfer(self, request: Any, params: Mapping[str, Any]) -> Any:
        sampling_params = copy.copy(request.sampling_params)
        sampling_params.extra_args = {**(sampling_params.extra_args or {}), KV_TRANSFER_PARAMS: dict(params)}
        return msgspec.structs.replace(request, sampling_params=sampling_params)

    def release(self, request_id: str, params: Mapping[str, Any]) -> Any | None:
        if not params.get("do_remote_prefill"):
            return None
        request = build_engine_core_request_from_tokens(request_id, tokens_input([0]), SamplingParams(max_tokens=1))
        # As vLLM's own server does for a request that it refuses: the scheduler tells the connector that it has ended.
        return msgspec.structs.replace(self.with_kv_transfer(request, params), abort_immediately=True)

    def without_cache(self, request: Any) -> Any:
        # The scheduler then takes no blocks from a connector either.
        sampling_params = copy.copy(request.sampling_params)
        sampling_params.skip_reading_prefix_cache = True
        return msgspec.structs.replace(request, sampling_params=sampling_params)

    def session_tokens(self, chunk: Any) -> int:
        return int(len(chunk.prompt_token_ids) + chunk.sampling_params.max_tokens)

    def reader(self, request: Any) -> TokenReader:
        return TextReader(request, self.tokenizer) if self._stage.output is Modality.TEXT else TokenReader(request)

    def answer(self, output: Any, read: StageOutput) -> Any:
        return output

    def _client_params(self, source: Any, over: Mapping[str, Any], chunked: bool) -> Any:
        """The client's parameters for this stage, without what only fits the first stage's model."""
        params = self._params.of_client(source.params, over, chunked)
        if self._is_pooling:
            return params
        room_of_entry = self._entry_config.max_model_len - len(source.prompt_token_ids or ())
        if params.max_tokens == room_of_entry and "max_tokens" not in over and not chunked:
            # vLLM's server sets this value for a request without `max_tokens`.
            params.max_tokens = None
        self._vocabulary.clear_entry_tokens(params)
        return params

    def _processed(self, source: Any, prompt: Mapping[str, Any], params: Any, part: InputPart = WHOLE) -> Any:
        """The request from vLLM's input processing, with `max_tokens` limited by the model's length."""
        room = self._room(length_of(prompt), part.tokens_before)
        if not self._is_pooling:
            params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
            params.min_tokens = min(params.min_tokens, params.max_tokens)
        request = self._processor.process_inputs(
            source.request_id,
            prompt,
            params,
            self._tasks,
            arrival_time=source.arrival_time,
            trace_headers=source.trace_headers,
            priority=source.priority,
            resumable=part.resumable,
            session_id=source.session_id,
        )
        request.external_req_id = source.external_req_id
        return request

    def _room(self, length: int, tokens_before: int) -> int:
        """How many tokens may still be made; refused if the input alone is too long."""
        at_most = self._config.max_model_len - tokens_before - (not self._is_pooling)
        if length > at_most:
            before = f", after {tokens_before} of its session," if tokens_before else ""
            raise ValueError(f"the input has {length} tokens{before} and its model takes at most {max(at_most, 0)}")
        return int(at_most - length + 1)

    def _refusal(self, error: Exception) -> StageInputError:
        return StageInputError(f"Stage {self._stage.name!r}: {error}")

    def _check_stage(self) -> None:
        """Refuse an output, chunks or text that the stage's model cannot make."""
        possible = _POOLED if self._is_pooling else _GENERATED
        if self._stage.output not in possible:
            kind = "pools" if self._is_pooling else "generates"
            raise PipelineError(f"its model {kind}, so it puts out one of {', '.join(possible)}", ("output",))
        if self._is_pooling and self._stage.async_chunk:
            raise PipelineError("vLLM's pooling models take no chunks", ("async_chunk",))
        if self._stage.output is Modality.TEXT and self.tokenizer is None:
            raise PipelineError("text needs a tokenizer, and its engine has none", ("output",))
        if self._stage.transform == BuiltInTransform.PROMPT_EMBEDS and not self._config.enable_prompt_embeds:
            raise PipelineError(NO_EMBEDDINGS, ("transform",))

    def _check_sampling(self) -> None:
        params = self._params.of_stage({})
        try:
            self._processor.process_inputs("", tokens_input([0]), params, self._tasks)
        except (*INVALID, TypeError) as error:
            raise PipelineError(str(error), ("sampling",)) from None


def _prompt_of(source: Any) -> Mapping[str, Any]:
    tokens = source.prompt_token_ids
    if source.prompt_embeds is None:
        return dict(tokens_input(tokens))
    return dict(embeds_input(source.prompt_embeds, prompt_token_ids=tokens, is_token_ids=source.prompt_is_token_ids))
