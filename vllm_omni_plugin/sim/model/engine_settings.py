"""What one simulated engine can do and how long it takes."""

from dataclasses import dataclass

from vllm_omni_plugin.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Capacities and service times of one engine.

    An iteration takes `step_s + prefill tokens * prefill_token_s + decoding sequences * sequence_s`: the linear model
    of continuous batching. The defaults resemble an 8B model on one accelerator.

    Attributes:
        step_s: seconds that every iteration takes, whatever is in it: reading the weights.
        prefill_token_s: seconds for each prompt token that is computed.
        sequence_s: seconds for each sequence that gets its next token.
        max_num_seqs: sequences in one iteration.
        max_num_batched_tokens: tokens in one iteration; longer prompts are computed in chunks.
        kv_blocks: blocks of KV memory.
        block_size: tokens in a block.
        max_model_len: tokens of prompt and output together.
        vocabulary_size: token ids are below it.
        prefix_caching: whether blocks are kept for prompts that begin with the same tokens.
        seed: stands for the weights: engines with the same seed give the same answers.

    Raises:
        ConfigError: the KV memory cannot hold one request of the maximum length.
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

    def duration(self, prefill_tokens: int, decoding: int) -> float:
        """Seconds of an iteration that computes so many prompt tokens and decodes so many sequences."""
        return self.step_s + prefill_tokens * self.prefill_token_s + decoding * self.sequence_s
