"""The input of a stage that starts before its upstream stage has ended."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_omni_plugin.pipeline import StageOutput


class OutputChunk(NamedTuple):
    """A chunk of one stage's output: one or more consecutive outputs. Numbers begin with 0."""

    outputs: tuple[StageOutput, ...]
    number: int
    last: bool


@dataclass(slots=True)
class ChunkedInput:
    """Cuts the output of one stage into chunks, and queues them for the next stage's transform.

    A chunk has at least `size` tokens (rows, for a tensor without tokens), except the last one. Where outputs have one
    token each, the cuts do not depend on time. Text without tokens or rows cannot be measured: it ends its chunk.

    `begun`: the next stage has got input. `session_tokens`: the most that its session can have after all chunks so far.
    """

    size: int
    chunks: deque[OutputChunk] = field(default_factory=deque)
    busy: bool = False
    begun: bool = False
    memory: dict[str, Any] = field(default_factory=dict)
    session_tokens: int = 0
    _rest: list[StageOutput] = field(default_factory=list)
    _rest_size: int = 0
    _count: int = 0

    def add(self, output: StageOutput, last: bool) -> None:
        """Add new output of the upstream stage; `last`: that stage has ended."""
        if self._rest_size >= self.size:
            # Cut only when more output follows, so that the last chunk is known to be the last.
            self._cut(last=False)
        self._rest.append(output)
        self._rest_size += _size_of(output, unmeasured=self.size)
        if last:
            self._cut(last=True)

    def next_chunk(self) -> OutputChunk | None:
        """The next chunk for the transform; None while it is busy or there is no chunk."""
        if self.busy or not self.chunks:
            return None
        self.busy = True
        return self.chunks.popleft()

    def _cut(self, last: bool) -> None:
        self.chunks.append(OutputChunk(tuple(self._rest), self._count, last))
        self._rest, self._rest_size = [], 0
        self._count += 1


def _size_of(output: StageOutput, unmeasured: int) -> int:
    if output.token_ids:
        return len(output.token_ids)
    if output.tensor is not None:
        return len(output.tensor) if output.tensor.ndim else 1
    return unmeasured if output.text else 0
