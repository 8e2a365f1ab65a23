"""Capacities and speed of a simulated engine."""

from dataclasses import dataclass
from typing import Any, Self

from vllm_omni_plugin.errors import ConfigError

DEFAULT_CONCURRENCY = 32
"""Number of requests of the maximum length for which the KV memory has room by default."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Capacities and service times of one engine.

    An iteration takes `step_s + prefill tokens * prefill_token_s + decoding sequences * sequence_s`: the linear model
    of continuous batching. The defaults resemble an 8B model on one accelerator. Prompts longer than
    `max_num_batched_tokens` are computed in chunks. `seed` is in place of the weights: engines with the same seed give
    the same answers.

    Raises ConfigError if the KV memory cannot hold one request of the maximum length.
    """

    step_s: float = 0.010
    prefill_token_s: float = 0.0001
    sequence_s: float = 0.0001
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    kv_blocks: int = 4096
    block_size: int = 16
    max_model_len: int = 4096
    vocabulary_size: int = 32000
    prefix_caching: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kv_blocks * self.block_size < self.max_model_len:
            raise ConfigError(
                f"{self.kv_blocks} KV blocks of {self.block_size} tokens cannot hold one request of the maximum model "
                f"length {self.max_model_len}: give at least {-(-self.max_model_len // self.block_size)}"
            )

    @classmethod
    def of(cls, vllm_config: Any, kv_blocks: int | None, prefix_caching: bool, **service_times: float) -> Self:
        """Settings with vLLM's capacities; without `kv_blocks` there is room for `DEFAULT_CONCURRENCY` requests."""
        model, cache, scheduler = vllm_config.model_config, vllm_config.cache_config, vllm_config.scheduler_config
        return cls(
            **service_times,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            kv_blocks=kv_blocks or DEFAULT_CONCURRENCY * -(-model.max_model_len // cache.block_size),
            block_size=cache.block_size,
            max_model_len=model.max_model_len,
            vocabulary_size=model.get_vocab_size(),
            prefix_caching=prefix_caching,
            seed=0,
        )

    def duration(self, prefill_tokens: int, decoding: int) -> float:
        """Duration of an iteration in seconds; `decoding` is a number of sequences."""
        return self.step_s + prefill_tokens * self.prefill_token_s + decoding * self.sequence_s
