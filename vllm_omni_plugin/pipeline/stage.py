"""A stage of a pipeline, as its file describes it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from vllm_omni_plugin.documents import Place, at_place
from vllm_omni_plugin.errors import ConfigError

VLLM_ENGINE = "vllm"
"""The value of `engine` that names vLLM's engine; any other names a Python class."""


class Modality(StrEnum):
    """The output of a stage."""

    TEXT = "text"
    TOKENS = "tokens"
    AUDIO = "audio"
    IMAGE = "image"
    EMBEDDING = "embedding"
    SCORES = "scores"
    LATENT = "latent"
    KV_CACHE = "kv_cache"
    """The KV cache of a prompt, for another engine of the same model."""


ANSWERS = frozenset({Modality.TEXT, Modality.TOKENS, Modality.AUDIO})
"""What can answer a request that samples; other modalities can only accompany these."""


@dataclass(frozen=True)
class Stage:
    """One model of a pipeline, served by a pool of replicas.

    `schema.json` says which values are allowed; `Pipeline` checks how stages fit together.

    Attributes:
        id: the ids of a pipeline are 0, 1, 2, ...
        name: identifier, unique in the pipeline.
        engine: `VLLM_ENGINE`, or `package.module:Class` of a Python engine.
        model: vLLM's model; None for a Python engine.
        engine_args: vLLM's engine arguments by the names of their long flags, with underscores.
        options: constructor arguments of the Python engine's class.
        inputs: names of the upstream stages; none: the stage gets the request itself.
        transform: a `BuiltInTransform` or `package.module:function`; None: the default, see `Pipeline.transform_of`.
        replicas: replicas that the head runs itself; with 0 the stage waits for headless nodes.
        policy: load-balancing policy of its pool.
        sampling: default sampling parameters.
        final: whether its output is an output of the pipeline.
        async_chunk: whether it starts on chunks of its input before the upstream stage has ended.
        chunk_size: minimum tokens, or rows of a tensor, of a chunk.
        min_prompt_tokens: for a prefill; requests with shorter prompts skip it.
    """

    id: int
    name: str
    engine: str
    output: Modality
    model: str | None = None
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    transform: str | None = None
    replicas: int = 1
    policy: str = "prefix"
    policy_config: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    final: bool = False
    async_chunk: bool = False
    chunk_size: int = 16
    min_prompt_tokens: int = 0

    @property
    def is_vllm(self) -> bool:
        return self.engine == VLLM_ENGINE


class PipelineError(ConfigError):
    """The stages do not form a valid pipeline; `place` says where the fault is in its file."""

    def __init__(self, message: str, place: Place) -> None:
        super().__init__(at_place(message, place))
        self.message = message
        self.place = place
