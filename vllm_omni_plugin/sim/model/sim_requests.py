"""What a simulated engine is asked and what it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]
"""As in vLLM."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request for tokens.

    Attributes:
        request_id: new to the engine.
        prompt: token ids, at least one.
        max_tokens: length of the answer at most, or None for as long as the model allows.
        min_tokens: length of the answer before which nothing but the maximum length ends it.
        stop_token_ids: tokens that end the answer.
        eos_token_id: token that ends the answer, and is never chosen unless `allowed` asks for it.
        allowed: if not empty, the only tokens to answer with.
        lora_id: the adapter, 0 for none; changes the answer.
        cache_salt: shares cached blocks only with requests of the same salt; does not change the answer.
    """

    request_id: str
    prompt: Sequence[int]
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    eos_token_id: int | None = None
    allowed: Sequence[int] = ()
    lora_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True, slots=True)
class Prefill:
    """How a request came to its first token. Times in seconds on the clock of whoever drives the engine.

    Attributes:
        queued_at: when it was submitted.
        scheduled_at: when its first iteration began.
        prompt_tokens: length of the prompt.
        cached_tokens: how many of them did not have to be computed.
    """

    queued_at: float
    scheduled_at: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SimOutput:
    """One step of an answer.

    Attributes:
        token: the next token, or None in an output that only ends the request.
        finish: why the answer ends here, or None if it goes on.
        stop_token: the stop token that ended it.
        prefill: with the first token only.
    """

    request_id: str
    token: int | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    prefill: Prefill | None = None


def to_request(request: Any) -> SimRequest:
    """What an `EngineCoreRequest` asks of the model.

    Raises:
        ValueError: it asks for what is not simulated.
    """
    if request.sampling_params is None or request.prompt_token_ids is None or request.resumable:
        raise ValueError("simulated engines generate from token ids only: no pooling, embeddings or streaming input")
    return _sim_request(request.request_id, request, request.cache_salt or "")


def from_scheduler(new: Any) -> SimRequest:
    """What a scheduler's `NewRequestData` asks of the model."""
    return _sim_request(new.req_id, new)


def _sim_request(request_id: str, request: Any, cache_salt: str = "") -> SimRequest:
    params = request.sampling_params
    return SimRequest(
        request_id,
        # A copy, since the scheduler lets the prompt of a streaming-input session grow in place.
        list(request.prompt_token_ids),
        params.max_tokens,
        params.min_tokens,
        frozenset(params.stop_token_ids or ()),
        params.eos_token_id,
        params.allowed_token_ids or (),
        request.lora_request.lora_int_id if request.lora_request else 0,
        cache_salt,
    )
