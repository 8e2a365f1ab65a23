"""The data that passes from stage to stage, and the type of transforms."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class StageOutput:
    """The output of a stage for a request: all of it, or one chunk.

    Attributes:
        token_ids: output tokens, without the prompt.
        text: the same as text, if the stage's output is text.
        tensor: a `torch.Tensor` on the CPU: embeddings or hidden states `[rows, width]`, scores `[classes]`, samples
            `[samples]`, or any tensor of a Python stage; None if there is none.
        metadata: plain data, as in JSON.
        finish_reason: `stop` or `length`; None for a chunk that is not the last.
    """

    token_ids: Sequence[int] = ()
    text: str = ""
    tensor: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class StageInput:
    """The input of a stage. A vLLM engine takes exactly one of tokens, text and embeddings; a Python stage takes any.

    Attributes:
        text: tokenised by the stage's own tokenizer.
        tensor: for vLLM: prompt embeddings, `[tokens, hidden size]`.
        metadata: plain data for a Python stage.
        sampling: sampling parameters that override the stage's.
    """

    token_ids: Sequence[int] | None = None
    text: str | None = None
    tensor: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


class InputPart(NamedTuple):
    """The part of a stage's input that an engine request contains.

    Attributes:
        resumable: it is a chunk of a streaming-input session.
        last: with `resumable`: no chunk with content follows.
        tokens_before: with `resumable`: the most tokens that the session can have before this chunk.
    """

    resumable: bool = False
    last: bool = True
    tokens_before: int = 0


WHOLE = InputPart()


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a transform knows about the request and the chunk that it works on.

    Attributes:
        request_id: the client's id.
        stage: name of the stage that gets the input.
        prompt_token_ids: the request's prompt, in tokens of the entry stage's model.
        prompt: the same as text, without special tokens; "" if unknown.
        params: plain data from the client, such as `voice`.
        chunk: number of the chunk, from 0; 0 for a whole output.
        last: whether this is the last chunk; true for a whole output.
        memory: kept from chunk to chunk of one request; empty at first.
    """

    request_id: str
    stage: str
    prompt_token_ids: Sequence[int] = ()
    prompt: str = ""
    params: Mapping[str, Any] = field(default_factory=dict)
    chunk: int = 0
    last: bool = True
    memory: dict[str, Any] = field(default_factory=dict)


Transform = Callable[[Mapping[str, StageOutput], Transfer], Any]
"""Turns outputs, by the names of their stages, into the next stage's input.

Returns a `StageInput`; or a str, a sequence of token ids or a tensor as a shorthand for one; or None for a chunk that
gives no input yet. It runs on a thread and may block. The same output must give the same input, because a request
whose replica is lost is sent again.
"""
