"""Requests to a simulated engine, and its outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

FinishReason = Literal["stop", "length", "abort", "error"]
"""As in vLLM."""


@dataclass(frozen=True, slots=True)
class SimRequest:
    """A request for tokens.

    Attributes:
        prompt: token ids, at least one.
        max_tokens: largest length of the answer; None: up to the maximum length of the model.
        min_tokens: up to this length, stop tokens do not end the answer.
        stop_token_ids: tokens that end the answer.
        eos_token_id: token that ends the answer; it is chosen only if it is in `allowed`.
        allowed: if not empty, the only possible tokens.
        lora_id: the adapter, 0 for none; changes the answer.
        cache_salt: requests share cached blocks only if their salts are equal; does not change the answer.
        logprobs: wanted log-probabilities of each position, beside that of the token; None: not even that.
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
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Prefill:
    """The prefill of a request. Times are in seconds of the caller's clock."""

    queued_at: float
    scheduled_at: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class SimOutput:
    """One step of an answer; without a token it only ends the request. The first one has the `prefill`.

    Attributes:
        logprobs: the chosen token and then the most probable ones, and their log-probabilities; None: not wanted.
    """

    request_id: str
    token: int | None = None
    finish: FinishReason | None = None
    stop_token: int | None = None
    prefill: Prefill | None = None
    logprobs: tuple[Sequence[int], Sequence[float]] | None = None


def to_request(request: Any) -> SimRequest:
    """Convert an `EngineCoreRequest`. Raises ValueError for features that are not simulated."""
    if request.sampling_params is None or request.prompt_token_ids is None or request.resumable:
        raise ValueError("simulated engines generate from token ids only: no pooling, embeddings or streaming input")
    params = request.sampling_params
    return SimRequest(
        request.request_id,
        request.prompt_token_ids,
        params.max_tokens,
        params.min_tokens,
        frozenset(params.stop_token_ids or ()),
        params.eos_token_id,
        params.allowed_token_ids or (),
        request.lora_request.lora_int_id if request.lora_request else 0,
        request.cache_salt or "",
        params.num_logprobs,
    )
