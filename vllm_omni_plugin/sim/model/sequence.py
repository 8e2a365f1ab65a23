"""One request in a simulated engine. Each token is a pure function of all tokens before it."""

from array import array
from collections.abc import Collection, Sequence
from hashlib import blake2b
from math import log

from vllm_omni_plugin.sim.model.engine_settings import EngineSettings
from vllm_omni_plugin.sim.model.kv_cache import Allocation, BlockKey
from vllm_omni_plugin.sim.model.sim_requests import FinishReason, Prefill, SimOutput, SimRequest

_HASH_BYTES = 8


class PrefixHash:
    """The hash of a growing sequence of token ids; a pure function of the salt and all tokens.

    It does not depend on the portions in which tokens are appended, nor on the length of the prompt. So a request that
    resumes or replays on another engine continues with the same tokens, and the hashes of blocks are chained. The salt
    holds the other values that the answer depends on, such as the seed.
    """

    def __init__(self, salt: bytes) -> None:
        self._state = blake2b(digest_size=_HASH_BYTES, key=blake2b(salt, digest_size=blake2b.MAX_KEY_SIZE).digest())

    def extend(self, tokens: Sequence[int]) -> None:
        self._state.update(array("I", tokens))

    @property
    def value(self) -> int:
        return int.from_bytes(self._state.digest())


def choose_token(value: int, vocabulary_size: int, allowed: Sequence[int], avoided: Collection[int]) -> int:
    """Choose a token by the hash of all tokens before it: from `allowed`, if there are any, else from the vocabulary.

    Tokens in `avoided` are chosen only if there are no others.
    """
    choices = len(allowed) or vocabulary_size
    token = 0
    # Neighbours are distinct, so among len(avoided) + 1 of them one is not avoided.
    for offset in range(len(avoided) + 1):
        index = (value + offset) % choices
        token = allowed[index] if allowed else index
        if token not in avoided:
            break
    return token


class SimSequence:
    """A request and its tokens. Raises the errors of `EngineModel.submit`.

    `length` is in tokens so far, and `limit` where it ends; `computed` have KV entries; `keys` are of all complete
    blocks.
    """

    def __init__(self, request: SimRequest, settings: EngineSettings, queued_at: float) -> None:
        prompt_tokens = len(request.prompt)
        if not 0 < prompt_tokens < settings.max_model_len:
            raise ValueError(f"a prompt of {prompt_tokens} tokens; it must have 1 to {settings.max_model_len - 1}")
        self.request = request
        self.length = 0
        self.limit = min(prompt_tokens + (request.max_tokens or settings.max_model_len), settings.max_model_len)
        self.computed = 0
        self.keys: list[BlockKey] = []
        self.allocation = Allocation()
        self._settings = settings
        self._hash = PrefixHash(b"%d/%d" % (settings.seed, request.lora_id))
        self._queued_at = queued_at
        self._scheduled_at = queued_at
        self._cached_tokens = 0
        self._extend(request.prompt)

    @property
    def pending(self) -> int:
        return self.length - self.computed

    @property
    def decoding(self) -> bool:
        return self.computed >= len(self.request.prompt)

    @property
    def reusable_keys(self) -> list[BlockKey]:
        """Keys of the prompt's blocks that may come from the cache; at least one token must be computed."""
        return self.keys[: (len(self.request.prompt) - 1) // self._settings.block_size]

    def admitted(self, allocation: Allocation, now: float) -> None:
        """Start the sequence with the cached blocks of its allocation."""
        self.allocation = allocation
        self.computed = self._cached_tokens = len(allocation.keys) * self._settings.block_size
        self._scheduled_at = now

    def next_output(self) -> SimOutput:
        """Choose and append the next token; only if `pending` is 0."""
        request, produced = self.request, self.length - len(self.request.prompt)
        token = choose_token(self._hash.value, self._settings.vocabulary_size, request.allowed, self._avoided(produced))
        self._extend((token,))
        finish = self._finish_reason(token, produced + 1)
        stop_token = token if finish == "stop" and token != request.eos_token_id else None
        prefill = None
        if not produced:
            prefill = Prefill(self._queued_at, self._scheduled_at, len(request.prompt), self._cached_tokens)
        return SimOutput(request.request_id, token, finish, stop_token, prefill, self._logprobs(token))

    def _logprobs(self, token: int) -> tuple[Sequence[int], Sequence[float]] | None:
        """The chosen token is the most probable one, and its neighbours follow, each half as probable."""
        count, vocabulary = self.request.logprobs, self._settings.vocabulary_size
        if count is None:
            return None
        offsets = range(vocabulary if count < 0 else count)
        tokens = [token, *((token + offset) % vocabulary for offset in offsets)]
        return tokens, [-log(2), *(-log(2) * (offset + 1) for offset in offsets)]

    def _extend(self, tokens: Sequence[int]) -> None:
        size, position = self._settings.block_size, 0
        while position < len(tokens):
            portion = tokens[position : position + size - self.length % size]
            self._hash.extend(portion)
            self.length += len(portion)
            position += len(portion)
            if self.length % size == 0 and self._settings.prefix_caching:
                self.keys.append((self.request.cache_salt, self._hash.value))

    def _avoided(self, produced: int) -> Collection[int]:
        request = self.request
        eos = () if request.eos_token_id is None else (request.eos_token_id,)
        if produced < request.min_tokens:
            return request.stop_token_ids.union(eos)
        return () if request.allowed else eos

    def _finish_reason(self, token: int, produced: int) -> FinishReason | None:
        request = self.request
        if produced >= request.min_tokens and (token == request.eos_token_id or token in request.stop_token_ids):
            return "stop"
        return "length" if self.length >= self.limit else None
