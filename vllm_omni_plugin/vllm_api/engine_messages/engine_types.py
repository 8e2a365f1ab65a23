"""Our types for what engines report, and for moves of requests. Importing this module does not import vLLM."""

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple

from msgspec import Struct

Frames = Sequence[Any]
"""Frames of one message; each supports the buffer protocol (bytes, memoryview, zmq.Frame)."""
ENGINE_SHUTTING_DOWN = "Server shutting down"
"""An engine that was asked to end answers every call with this error. It finishes the requests that it has."""


class LoadReport(Struct, frozen=True, gc=False):
    """The load that an engine reports with a step; `kv_usage` is the share of its KV memory in use, 0 to 1."""

    waiting: int
    running: int
    kv_usage: float


class EngineSize(NamedTuple):
    """KV blocks, their tokens, tokens and sequences of the largest step, tokens of the longest request, LoRA adapters.

    That many adapters are loaded at once. 0: unknown.
    """

    blocks: int = 0
    block_size: int = 0
    step_tokens: int = 0
    sequences: int = 0
    max_model_len: int = 0
    adapters: int = 0


class Move(Enum):
    """How a request continues on another replica when its own is lost."""

    RESTART = "restart"
    """From the start. Exact as long as nothing was delivered to the client."""
    RESUME = "resume"
    """The delivered tokens become part of the prompt, and `max_tokens` and `min_tokens` shrink by their number."""
    REPLAY = "replay"
    """From the start; outputs that repeat the delivered tokens are dropped."""
    NEVER = "never"
    """It cannot move once a part of its answer has been delivered."""
    PINNED = "pinned"
    """It can never move: it needs state that an earlier request with its affinity key left on its replica."""
