"""Sampling and pooling parameters for the requests of one stage, from its file, transforms and clients."""

import copy
from collections.abc import Mapping
from difflib import get_close_matches
from types import SimpleNamespace
from typing import Any

import msgspec
from vllm.exceptions import VLLMClientError
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

from vllm_omni_plugin.pipeline import Modality, PipelineError, Stage

KV_TRANSFER_PARAMS = "kv_transfer_params"
INVALID = (ValueError, VLLMClientError)
"""The errors that vLLM raises for invalid parameters and prompts."""
_NOT_FOR_STAGES = {"n", "detokenize", "output_kind", "output_text_buffer_length", "skip_clone", "stream_interval"}
_LOGPROBS = {
    "flat_logprobs",
    "logprob_token_ids",
    "logprobs",
    "prompt_logprob_start",
    "prompt_logprob_token_ids",
    "prompt_logprobs",
}
"""Only clients ask for log-probabilities, with their own parameters, and only from the stage that answers."""
_SAMPLING_KEYS = tuple(
    field.name
    for field in msgspec.structs.fields(SamplingParams)
    if not field.name.startswith("_") and field.name not in _NOT_FOR_STAGES | _LOGPROBS
)
_INT64 = range(-(2**63), 2**63)
"""The integers that vLLM's server and engines accept."""
_POOLING_KEYS = {
    field.name: field.type
    for field in msgspec.structs.fields(PoolingParams)
    if field.name in {"task", "use_activation", "dimensions", "step_tag_id", "returned_token_ids"}
}
"""The types of their values, by name."""
_PREFILL: Mapping[str, Any] = {
    "max_tokens": 1,
    "temperature": 0.0,
    # Connectors keep only the caches of requests that end because of their length.
    "ignore_eos": True,
    "extra_args": {
        KV_TRANSFER_PARAMS: {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    },
}
"""Sampling parameters of a prefill stage, as sent by vLLM's own proxies for disaggregated prefill."""

_TASKS: Mapping[str, str] = {
    "ForTokenClassification": "token_classify",
    "Classification": "classify",
    "ClassificationModel": "classify",
}
"""Pooling tasks by the end of an architecture's name."""


class ParameterError(ValueError):
    """Invalid parameters for a stage; `key` names the invalid one, None if only a combination is invalid."""

    def __init__(self, message: str, key: str | None = None) -> None:
        super().__init__(message)
        self.key = key


class StageParams:
    """Creates the parameters of a stage's requests. Raises PipelineError at a place relative to the stage."""

    def __init__(self, stage: Stage, model_config: Any) -> None:
        self._stage = stage
        self._is_pooling = model_config.runner_type == "pooling"
        self._own = dict(_PREFILL if stage.output is Modality.KV_CACHE else stage.sampling)
        self._default: dict[str, Any] = {"task": _default_task(model_config)} if self._is_pooling else {}
        try:
            self._template = self._made({})
        except ParameterError as error:
            place = ("sampling",) if error.key is None else ("sampling", error.key)
            raise PipelineError(str(error), place) from None

    @property
    def task(self) -> str | None:
        task: str | None = self._template.task if self._is_pooling else None
        return task

    def of_stage(self, given: Mapping[str, Any]) -> Any:
        """The stage's parameters, overridden by those in `given`. Raises ParameterError if these are invalid."""
        if not given:
            return copy.copy(self._template)
        self._check_request(given)
        return self._made(given)

    def of_client(self, params: Any, given: Mapping[str, Any], chunked: bool) -> Any:
        """A client's parameters, overridden by those in `given`. Raises ParameterError if they do not fit the stage.

        With `chunked` they are for one turn of a session, which the file's `max_tokens` limits too.
        """
        if isinstance(params, PoolingParams) is not self._is_pooling or (self._is_pooling and params.task != self.task):
            kind = "scores or embeds" if self._is_pooling else "generates"
            raise ParameterError(f"it {kind}, which is not what the request asks for")
        own = _copied(params)
        if given:
            self._check_request(given)
            _overlay(own, given, self._converted(given))
        if self._is_pooling:
            return own
        # No other request uses it.
        own.skip_clone = True
        if chunked:
            own.max_tokens = min(own.max_tokens or self._own["max_tokens"], self._own["max_tokens"])
        return own

    def _check_request(self, given: Mapping[str, Any]) -> None:
        if self._is_pooling and "task" in given:
            # An engine dies of a task that its model does not have.
            raise ParameterError("the task can be set only in the pipeline's file", "task")

    def _made(self, given: Mapping[str, Any]) -> Any:
        params = self._converted({**self._default, **self._own, **given})
        if not self._is_pooling:
            params.detokenize = self._stage.output is Modality.TEXT
            params.skip_clone = True
        return params

    def _converted(self, values: Mapping[str, Any]) -> Any:
        """Parameters with these values; all others have vLLM's defaults, except `max_tokens`, which has none."""
        known = tuple(_POOLING_KEYS) if self._is_pooling else _SAMPLING_KEYS
        for key, value in values.items():
            if isinstance(value, int) and value not in _INT64:
                raise ParameterError(f"{key!r} has more than 64 bits", key)
            if key not in known:
                close = get_close_matches(key, known, n=1)
                known_ones = f"did you mean {close[0]!r}?" if close else f"use {', '.join(known)}"
                raise ParameterError(f"unknown parameter {key!r}: {known_ones}", key)
        if values.get("stop"):
            self._check_stop()
        try:
            return self._read(values)
        except INVALID as error:
            raise ParameterError(str(error), self._wrong_key(values)) from None

    def _check_stop(self) -> None:
        """Refuse stop strings where a stage cannot stop at text."""
        if self._stage.output is not Modality.TEXT:
            raise ParameterError("stop strings need a stage whose output is text; use 'stop_token_ids'", "stop")
        if self._stage.async_chunk:
            raise ParameterError("a stage that works on chunks cannot stop at strings; use 'stop_token_ids'", "stop")

    def _wrong_key(self, values: Mapping[str, Any]) -> str | None:
        """The key whose value alone is invalid; None if only the combination is."""
        for key, value in values.items():
            try:
                self._read({key: value})
            except INVALID:
                return key
        return None

    def _read(self, values: Mapping[str, Any]) -> Any:
        if self._is_pooling:
            return PoolingParams(**{key: msgspec.convert(value, _POOLING_KEYS[key]) for key, value in values.items()})
        return msgspec.convert({"max_tokens": None, **values}, SamplingParams)


def _default_task(model_config: Any) -> str:
    """The task of a stage whose file sets none, derived from the model's configuration."""
    pooler = model_config.pooler_config
    if pooler is not None and pooler.task is not None:
        return str(pooler.task)
    for end, named in _TASKS.items():
        if any(architecture.endswith(end) for architecture in model_config.architectures):
            return named
    return "classify" if model_config.convert_type == "classify" else "embed"


def _copied(params: Any) -> Any:
    """A copy that shares no part that vLLM or `Vocabulary` changes in place; a deep copy takes 0.1 ms more."""
    own = copy.copy(params)
    if not isinstance(own, PoolingParams):
        own._all_stop_token_ids = set(own._all_stop_token_ids)
        own.structured_outputs = copy.copy(own.structured_outputs)
    return own


def _overlay(params: Any, given: Mapping[str, Any], values: Any) -> None:
    for key in given:
        setattr(params, key, getattr(values, key))
    try:
        # It sets what depends on other parameters, such as top_p for greedy sampling.
        params.__post_init__()
    except INVALID as error:
        raise ParameterError(str(error)) from None


_OF_POOLING = frozenset({Modality.EMBEDDING, Modality.SCORES})
_SERVER_DEFAULTS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_tokens": "max_new_tokens",
}
"""Sampling parameters for which vLLM's server has defaults, and their names in `override_generation_config`."""


def check_sampling(stage: Stage, *, by_client: bool) -> None:
    """Check the sampling parameters of a stage that vLLM runs; raises PipelineError.

    With `by_client`, clients' parameters are for this stage, and vLLM's server has defaults only for some parameters.
    """
    if stage.output is not Modality.LATENT:
        # The check does not need the model's configuration, which is read later.
        runner = "pooling" if stage.output in _OF_POOLING else "generate"
        StageParams(stage, SimpleNamespace(runner_type=runner, pooler_config=SimpleNamespace(task="embed")))
    for name in stage.sampling:
        if by_client and stage.output not in _OF_POOLING and name not in _SERVER_DEFAULTS:
            known = ", ".join(_SERVER_DEFAULTS)
            message = f"clients set the parameters of this stage, and the server has defaults only for {known}"
            raise PipelineError(message, ("sampling", name))


def set_server_defaults(model_config: Any, stage_model_config: Any, sampling: Mapping[str, Any]) -> None:
    """Make a stage's sampling parameters, and the defaults of its model, the defaults of vLLM's server.

    Changes the server's `model_config`, unless the user has overridden its generation configuration.
    """
    if any(value is not None for value in model_config.override_generation_config.values()):
        return
    defaults = dict(sampling)
    if stage_model_config is not model_config:
        # A None removes a default of the entry stage's model.
        of_model = dict.fromkeys(_SERVER_DEFAULTS) | stage_model_config.get_diff_sampling_param()
        # A `max_tokens` set here would limit the `max_tokens` of requests; a model's own default does not.
        defaults = of_model | {"max_tokens": None} | defaults
    model_config.override_generation_config |= {_SERVER_DEFAULTS[name]: value for name, value in defaults.items()}
