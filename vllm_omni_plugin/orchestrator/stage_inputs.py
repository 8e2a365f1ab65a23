"""What goes into the stages of a pipeline: made off the loop, whole or in chunks, and handed to them in order."""

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from vllm_omni_plugin.errors import OmniError, StageError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.chunk_input import ChunkInput, Piece
from vllm_omni_plugin.orchestrator.preparation import Chunk, Preparation, WholeInput
from vllm_omni_plugin.orchestrator.request_state import PipelineRequestState
from vllm_omni_plugin.orchestrator.stage_run import StageRun, StreamingInputState
from vllm_omni_plugin.pipeline import Stage
from vllm_omni_plugin.pipeline.transfer import StageOutput

logger = init_logger(__name__)


class InputTaker(Protocol):
    """Who runs stages on their inputs; `PipelineRequests` in service."""

    def wants(self, state: PipelineRequestState) -> bool:
        """Whether a request has not ended. Safe to call from any thread."""

    def start_run(
        self, state: PipelineRequestState, stage: Stage, given: WholeInput, session: StreamingInputState | None
    ) -> None:
        """A stage's input, or the first chunk of it, is there."""

    def add_chunk(self, stage: Stage, run: StageRun, chunk: Any) -> None:
        """There is more of it, or its end."""

    def input_failed(self, state: PipelineRequestState, stage: Stage, error: OmniError) -> None:
        """It cannot be made."""

    def spend(self, state: PipelineRequestState, stage: Stage, part: str, seconds: float) -> None:
        """A request has spent this on a part of a stage."""


class StageInputs:
    """Lives on the orchestrator's loop; what may take long is done by `preparation`.

    Args:
        preparation: makes inputs.
        taker: see `InputTaker`.
        clock: monotonic seconds.
    """

    def __init__(self, preparation: Preparation, taker: InputTaker, clock: Callable[[], float]) -> None:
        self._preparation = preparation
        self._taker = taker
        self._clock = clock

    def begin(self, state: PipelineRequestState, stage: Stage) -> None:
        """All stages in front of this one have ended."""
        self._note_begin(state, stage)
        work = partial(self._preparation.whole, state, stage)
        self._prepare(state, stage, work, partial(self._start, state, stage))

    def add_output(self, state: PipelineRequestState, stage: Stage, output: StageOutput, last: bool) -> None:
        """The stage in front of one that works on chunks has put something out, and has ended if this is the last."""
        chunks = state.chunk_inputs.get(stage.id)
        if chunks is None:
            chunks = state.chunk_inputs[stage.id] = ChunkInput(stage.chunk_size)
            self._note_begin(state, stage)
        chunks.add(output, last)
        self._make_next(state, stage, chunks)

    def close(self) -> None:
        """Make no more. Idempotent."""
        self._preparation.close()

    def _note_begin(self, state: PipelineRequestState, stage: Stage) -> None:
        state.begun.add(stage.id)
        state.stage_submit_ts[stage.id] = self._clock()

    def _start(self, state: PipelineRequestState, stage: Stage, given: WholeInput) -> None:
        self._taker.start_run(state, stage, given, None)

    def _make_next(self, state: PipelineRequestState, stage: Stage, chunks: ChunkInput) -> None:
        """Let the transform have the next piece, if there is one and it has time."""
        piece = chunks.take()
        if piece is not None:
            work = partial(self._preparation.chunk, state, stage, chunks, piece)
            self._prepare(state, stage, work, partial(self._chunk_made, state, stage, chunks, piece))

    def _chunk_made(
        self, state: PipelineRequestState, stage: Stage, chunks: ChunkInput, piece: Piece, chunk: Chunk
    ) -> None:
        chunks.busy = False
        if chunk.request is not None:
            self._hand_over(state, stage, chunks, chunk.request)
        if piece.last and not chunks.begun:
            error = StageError(f"Stage {stage.name!r}: its transform returned nothing for the whole input.")
            self._taker.input_failed(state, stage, error)
        if chunk.end is not None and self._taker.wants(state):
            self._hand_over(state, stage, chunks, chunk.end)
        if self._taker.wants(state):
            self._make_next(state, stage, chunks)

    def _hand_over(self, state: PipelineRequestState, stage: Stage, chunks: ChunkInput, chunk: Any) -> None:
        if not chunks.begun:
            chunks.begun = True
            self._taker.start_run(state, stage, WholeInput(chunk), StreamingInputState(replayable=True))
            return
        run = state.runs[stage.id]
        if not run.finished:
            self._taker.add_chunk(stage, run, chunk)

    def _prepare(
        self, state: PipelineRequestState, stage: Stage, work: Callable[[], Any], then: Callable[[Any], None]
    ) -> None:
        done = partial(self._prepared, state, stage, self._clock(), then)
        self._preparation.prepare(stage, work, partial(self._taker.wants, state), done)

    def _prepared(
        self,
        state: PipelineRequestState,
        stage: Stage,
        began: float,
        then: Callable[[Any], None],
        outcome: Callable[[], Any],
    ) -> None:
        """The preparation is done, for a request that may have been given up meanwhile."""
        if not self._taker.wants(state):
            return
        self._taker.spend(state, stage, "transfer", self._clock() - began)
        try:
            then(outcome())
        except OmniError as error:
            self._taker.input_failed(state, stage, error)
        except Exception as error:  # of one request, which must not stop the others
            logger.exception("Stage %r cannot go on with request %s.", stage.name, state.request_id)
            failure = StageError(f"Stage {stage.name!r}: its input could not be made: {error}")
            self._taker.input_failed(state, stage, failure)
