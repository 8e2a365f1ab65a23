"""What passes from stage to stage, and the type of transforms, which turn outputs into inputs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a stage has put out for a request: all of it, or one chunk.

    Attributes:
        token_ids: tokens of its model, without those of the prompt.
        text: the same as text, where the stage's output is text.
        tensor: a `torch.Tensor` on the CPU: embeddings or hidden states `[rows, width]`, scores `[classes]`, samples
            `[samples]`, or any other tensor of a Python stage; None if there is none.
        metadata: plain data (what JSON can hold) that belongs to it.
        finish_reason: why the stage ended (`stop`, `length`); None for a chunk that is not the last.
    """

    token_ids: Sequence[int] = ()
    text: str = ""
    tensor: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None


@dataclass(frozen=True, slots=True)
class StageInput:
    """What a stage shall compute on. vLLM's engine takes one of tokens, text and embeddings, a Python stage any.

    Attributes:
        token_ids: a prompt of tokens.
        text: a prompt of text, tokenised by the stage's own tokenizer.
        tensor: for vLLM: embeddings in place of a prompt, `[tokens, hidden size]`.
        metadata: plain data for a Python stage.
        sampling: sampling parameters of this request, over those of the stage.
    """

    token_ids: Sequence[int] | None = None
    text: str | None = None
    tensor: Any = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)


class InputPart(NamedTuple):
    """Which part of a stage's input a request of its engine brings.

    Attributes:
        resumable: it is a chunk of a streaming-input session.
        last: with `resumable`, no chunk with content will follow.
        held: with `resumable`, tokens that the session has at most before this chunk.
    """

    resumable: bool = False
    last: bool = True
    held: int = 0


WHOLE = InputPart()


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a transform is told about the request and the chunk that it works on.

    Attributes:
        request_id: the client's id.
        stage: name of the stage that gets the input.
        prompt_token_ids: the request's prompt, in tokens of the model that it was made for.
        prompt: the same as text, without special tokens; "" where it is unknown.
        params: what the client gave for stages to read, such as `voice`; plain data.
        chunk: number of the chunk, from 0; always 0 where the stage waits for whole outputs.
        last: whether nothing follows; always true where the stage waits for whole outputs.
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

Returns a `StageInput`, or as a shorthand for one a str, a sequence of token ids, or a tensor; None for a chunk that
gives nothing yet. It runs on a thread of its own and may block; the same output must give the same input, since a
request whose replica is lost is sent again.
"""
