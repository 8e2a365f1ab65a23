"""The input of a stage that starts before the stage in front of it has ended."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from vllm_omni_plugin.pipeline.transfer import StageOutput


class OutputChunk(NamedTuple):
    """A chunk of one stage's output.

    Attributes:
        outputs: what is in it, in order; at least one.
        number: from 0.
        last: whether nothing follows.
    """

    outputs: tuple[StageOutput, ...]
    number: int
    last: bool


@dataclass(slots=True)
class ChunkedInput:
    """Cuts one stage's output into pieces, and keeps those that the next stage's transform has not taken yet.

    A piece has at least `size` tokens (rows, where a tensor comes without tokens), but for the last one. Where outputs
    come one token at a time, where it ends does not depend on time. Text that comes without either cannot be measured:
    it ends its piece.

    Attributes:
        size: see above.
        pieces: those that wait for the transform, in order.
        busy: whether it works on one.
        begun: whether the next stage has got any input.
        memory: see `Transfer`.
        held: tokens that the next stage's session has at most, with all chunks that have been built.
    """

    size: int
    pieces: deque[OutputChunk] = field(default_factory=deque)
    busy: bool = False
    begun: bool = False
    memory: dict[str, Any] = field(default_factory=dict)
    held: int = 0
    _rest: list[StageOutput] = field(default_factory=list)
    _rest_size: int = 0
    _count: int = 0

    def add(self, output: StageOutput, last: bool) -> None:
        """The stage in front has put something out.

        Args:
            output: what is new.
            last: whether it has ended with it.
        """
        if self._rest_size >= self.size:
            # Not before something follows, so that the last piece is known to be the last.
            self._cut(last=False)
        self._rest.append(output)
        self._rest_size += _size_of(output, unmeasured=self.size)
        if last:
            self._cut(last=True)

    def take(self) -> OutputChunk | None:
        """The next piece for the transform; None while it is busy or there is none."""
        if self.busy or not self.pieces:
            return None
        self.busy = True
        return self.pieces.popleft()

    def _cut(self, last: bool) -> None:
        self.pieces.append(OutputChunk(tuple(self._rest), self._count, last))
        self._rest, self._rest_size = [], 0
        self._count += 1


def _size_of(output: StageOutput, unmeasured: int) -> int:
    if output.token_ids:
        return len(output.token_ids)
    if output.tensor is not None:
        return len(output.tensor) if output.tensor.ndim else 1
    return unmeasured if output.text else 0
