"""The work of one stage on one request: a state machine whose transitions do no I/O."""

from array import array
from collections.abc import Collection, Sequence
from enum import Enum
from functools import partial
from math import inf
from typing import Any, NamedTuple, Protocol

from msgspec import Struct, field

from vllm_omni_plugin.admission import Ticket
from vllm_omni_plugin.balancing import Decision, Task
from vllm_omni_plugin.balancing.interface import NO_PROMPT
from vllm_omni_plugin.balancing.replica_adapters import adapter_key
from vllm_omni_plugin.errors import NoReplicaError, OmniError, QueryOfDeathError, RequestLostError
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ChosenReplicas
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Move


class RequestPhase(Enum):
    """The phase of a request in one stage."""

    WAITING = "waiting"
    """It has no replica yet."""
    ASSIGNED = "assigned"
    """A replica was chosen, and has not sent any output that is new to the client."""
    STREAMING = "streaming"
    """The replica's outputs go to the client."""
    MOVING = "moving"
    """Its replica was lost, and it has no other replica yet."""
    FINISHED = "finished"
    """No output follows, for whatever reason."""


_UNDECIDED = Decision(0, "")


class LostReplica(Protocol):
    """A `PoolMember`. A new member with the id of an old one is another replica."""

    replica_id: int
    name: str

    @property
    def machine(self) -> str: ...


class Loss(Struct, eq=False):
    """The loss of one replica, shared by all requests that were in flight there, those of `others` as reported.

    The culprit is the request that crashed the engine, if there is one and it is known.
    """

    replica: LostReplica
    reason: str
    requests: int = 0
    others: int = 0
    culprit: "StageRun | None" = None


class StreamingInputState(Struct, eq=False):
    """A session whose prompt arrives in chunks, each answered by a turn of output.

    The engine keeps the session between its turns, and ends it after the last turn once the input is closed. `unsent`
    and `sent` are chunks after the first; sent ones are kept of a replayable session only, so that it can move.
    Clients' sessions are not, since they may have no end. `open_turns` are chunks whose turn has not finished.
    """

    replayable: bool = False
    open_turns: int = 1
    input_closed: bool = False
    unsent: list[Any] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)

    @property
    def over(self) -> bool:
        return self.input_closed and self.open_turns == 0

    def take_unsent(self) -> list[Any]:
        """Remove and return the unsent chunks, and count them as sent."""
        chunks, self.unsent = self.unsent, []
        self.note_sent(*chunks)
        return chunks

    def note_sent(self, *chunks: Any) -> None:
        if self.replayable:
            self.sent.extend(chunks)

    def rewind(self) -> None:
        """Start again at another replica: all chunks are unsent."""
        self.unsent, self.sent = [*self.sent, *self.unsent], []
        self.open_turns = 1 + sum(chunk.resumable for chunk in self.unsent)


class StageRun(Struct, eq=False):
    """The work of one stage on one request, from its input to its end, over all attempts.

    An attempt is one assignment to one replica. The attributes from `task` on belong to the current attempt, as do
    `engine_request_id` and `move`: how it continues the earlier ones. Times are in monotonic seconds.

    Attributes:
        request_id, request: the client's; vLLM's `EngineCoreRequest`, or what a stage of another kind takes.
        phase: changed by the methods below only.
        attempts: how many were sent.
        produced: token ids delivered so far, over all attempts.
        skipping_delivered: whether outputs of the current attempt may still repeat delivered tokens.
        first_request: what the first replica gets in place of `request`: it names a cache that a prefill has left.
        first_until: monotonic seconds until which it may be sent.
        ticket: the request's place in the order of all; None without admission control.
        losses, crash_losses: of replicas that had got the request; those by crashes of engines, see `Suspects`.
        apart_until: delivered tokens until which the request is kept apart from other suspects.
        refused_by: ids of the replicas that have refused it, being paused.
        ended: whether `RunFinisher` has ended the run: it is charged to no replica and waits nowhere. Before that it
            has `finished`: no output follows.
        asked_at: since when the replica has had something to answer: a request, or input of a session.
        resumed_tokens: how many tokens of `produced` are part of the attempt's prompt.
        prefill_tokens: tokens of the attempt's prompt that count as still to be computed until the first output.
        adapter: the `adapter_key` of the LoRA adapter; "" without one.
        output_tokens: tokens that the engine has produced in the attempt.
    """

    request_id: str
    request: Any
    submitted_at: float
    phase: RequestPhase = RequestPhase.WAITING
    replica_id: int | None = None
    engine_request_id: str = ""
    attempts: int = 0
    sent: bool = False
    streaming: StreamingInputState | None = None
    produced: "array[int]" = field(default_factory=partial(array, "q"))
    move: Move = Move.RESTART
    skipping_delivered: bool = False
    chosen_replicas: ChosenReplicas | None = None
    first_request: Any = None
    first_until: float = inf
    ticket: Ticket | None = None
    first_sent_at: float | None = None
    losses: list[Loss] = field(default_factory=list)
    crash_losses: list[Loss] = field(default_factory=list)
    apart_until: float = 0
    refused_by: Collection[int] = ()
    ended: bool = False
    affinity_key: int | None = None
    task: Task = field(default_factory=Task)
    decision: Decision = _UNDECIDED
    charged_at: float = 0.0
    asked_at: float = 0.0
    resumed_tokens: int = 0
    prompt_tokens: int = 0
    prefill_tokens: int = 0
    adapter: str = ""
    has_output: bool = False
    output_tokens: int = 0
    _to_skip: int = 0
    _loss: str = ""

    def __repr__(self) -> str:
        return f"request {self.request_id} is {self.phase.value}"

    @property
    def finished(self) -> bool:
        return self.phase is RequestPhase.FINISHED

    @property
    def is_given_cache(self) -> bool:
        """Whether the attempt was sent with a cache that a prefill has left."""
        return self.attempts == 1 and self.first_request is not None and self.first_request is not self.request

    @property
    def awaits_cache(self) -> bool:
        """Whether it was, and nothing has come of it yet."""
        return self.is_given_cache and self.sent and self.phase is RequestPhase.ASSIGNED and not self.has_output

    @property
    def confined_to(self) -> set[LostReplica]:
        """The only replicas to which the request may go, since two have crashed with it in flight; empty: all."""
        crashed = {loss.replica for loss in self.crash_losses}
        return crashed if len(crashed) > 1 else set()

    @property
    def unexplained_crashes(self) -> list[Loss]:
        """The crashes that the request may have caused, since no culprit is known."""
        return [loss for loss in self.crash_losses if loss.culprit is None] if self.crash_losses else []

    @property
    def must_be_apart(self) -> bool:
        """Whether the request is kept apart from other suspects, see `Suspects`."""
        return len(self.produced) < self.apart_until and bool(self.unexplained_crashes)

    def count_prompt(self) -> None:
        """Set `prompt_tokens` to what the next attempt will have."""
        prompt = self.task.get("prompt")
        self.prompt_tokens = len(prompt.token_ids) if prompt is not None else 0

    def assign(self, replica_id: int, engine_request_id: str, task: Task, decision: Decision, now: float) -> None:
        assert self.phase in (RequestPhase.WAITING, RequestPhase.MOVING), self
        self.phase = RequestPhase.ASSIGNED
        self.replica_id = replica_id
        self.engine_request_id = engine_request_id
        self.sent = self.has_output = False
        self.task, self.decision, self.charged_at = task, decision, now
        prompt = task.get("prompt", NO_PROMPT)
        self.prompt_tokens = len(prompt.token_ids)
        self.adapter = adapter_key(prompt.lora_name) if prompt.lora_name else ""
        self.prefill_tokens = max(0, self.prompt_tokens - decision.matched_tokens)
        self.output_tokens = 0
        self.resumed_tokens = len(self.produced) if self.move is Move.RESUME else 0

    def skip_delivered(self, tokens: Sequence[int], finished: bool) -> int:
        """Compare an output of a moved request with what was delivered before; returns how many tokens the client has.

        If they differ, the run has finished with the RequestLostError that is raised.
        """
        assert self.phase is RequestPhase.ASSIGNED, self
        skip = min(self._to_skip, len(tokens))
        begin = len(self.produced) - self._to_skip
        self._to_skip -= skip
        repeats = self.produced[begin : begin + skip].tolist() == list(tokens[:skip])
        if not repeats or (finished and self._to_skip and self.streaming is None):
            self.phase = RequestPhase.FINISHED
            raise RequestLostError(
                f"{self._loss}, and the replica that took over did not repeat the part of the answer that had been "
                "delivered. Please send it again."
            )
        all_delivered = skip == len(tokens)
        if self.streaming is None:
            self.skipping_delivered = all_delivered and not finished
            return skip
        self.skipping_delivered = all_delivered
        if all_delivered and finished:
            # The end of a turn comes with its last token, so it was delivered, too.
            self._end_turn(self.streaming)
        return skip

    def _end_turn(self, session: StreamingInputState) -> None:
        session.open_turns -= 1
        if session.over:
            self.phase = RequestPhase.FINISHED

    def deliver(self, tokens: Sequence[int], finished: bool, cut_short: bool = False) -> None:
        """Deliver an output of the current attempt, the last one, or of a session's turn, if finished.

        With `cut_short` no further turn of the session will follow.
        """
        if self.phase is not RequestPhase.STREAMING:
            assert self.phase is RequestPhase.ASSIGNED, self
            self.phase = RequestPhase.STREAMING
        self.produced.extend(tokens)
        if not finished:
            return
        if self.streaming is not None and not cut_short:
            self._end_turn(self.streaming)
        else:
            self.phase = RequestPhase.FINISHED

    def add_chunk(self, chunk: Any) -> None:
        """Add a chunk to a streaming-input session; a chunk that is not resumable closes the input."""
        assert self.streaming is not None
        if chunk.resumable:
            self.streaming.open_turns += 1
        else:
            self.streaming.input_closed = True
        if self.streaming.over:
            self.phase = RequestPhase.FINISHED

    def end(self) -> None:
        """No output follows, whatever the phase was. For `RunFinisher`. Idempotent."""
        self.phase, self.ended = RequestPhase.FINISHED, True

    def lose_replica(
        self, loss: Loss, migration_limit: int, on_delivered: Move, vocabulary: int | None = None
    ) -> RequestLostError | None:
        """The replica is lost that had got the current attempt: the run moves, or finishes with the returned error.

        Losses with another culprit do not count for `migration_limit`. `on_delivered`, from `EngineApi.how_to_move`,
        counts only once a part of the answer was delivered; before that the run restarts. A `PINNED` run never moves.
        """
        assert self.phase in (RequestPhase.ASSIGNED, RequestPhase.STREAMING), self
        self.losses.append(loss)
        self._loss = f"Replica {loss.replica.replica_id} was lost while it served this request ({loss.reason})"
        replayable = self.streaming is not None and self.streaming.replayable
        restarts = not self.produced and on_delivered is not Move.PINNED
        move = Move.RESTART if restarts else Move.REPLAY if replayable else on_delivered
        error = self._why_not_movable(move, migration_limit, vocabulary)
        if error is not None:
            self.phase = RequestPhase.FINISHED
            return error
        self.phase = RequestPhase.MOVING
        self.replica_id = None
        self.engine_request_id = ""
        self.move = move
        self.skipping_delivered = move is not Move.RESTART
        self._to_skip = len(self.produced) if move is Move.REPLAY else 0
        if self.streaming is not None:
            self.streaming.rewind()
        return None

    def unassign(self) -> None:
        """End the current attempt: the replica has not got it, or has refused it."""
        assert self.phase is RequestPhase.ASSIGNED, self
        self.phase = RequestPhase.MOVING
        self.replica_id = None
        self.engine_request_id = ""
        if self.streaming is not None:
            self.streaming.rewind()

    def fail_without_replica(self, error: NoReplicaError) -> OmniError:
        """Finish the run, since no replica can take it. Returns the error for its client."""
        assert self.phase in (RequestPhase.WAITING, RequestPhase.MOVING), self
        self.phase = RequestPhase.FINISHED
        if self.confined_to:
            return self.query_of_death()
        if self.produced:
            return RequestLostError(f"{self._loss}, after part of the answer had been delivered. {error}")
        return error

    def query_of_death(self) -> QueryOfDeathError:
        which = ", ".join(f"replica {loss.replica.replica_id} ({loss.reason})" for loss in self.crash_losses)
        return QueryOfDeathError(
            f"{len(self.crash_losses)} engines died while they ran this request: {which}. They may have died of it, so "
            "it gets no third replica."
        )

    def _why_not_movable(self, move: Move, migration_limit: int, vocabulary: int | None) -> RequestLostError | None:
        """Why a run ends with its replica: the first reason that applies; None if it may move."""
        if self.losses[-1].culprit is self:
            return self.query_of_death()
        if self.streaming is not None and not self.streaming.replayable:
            return RequestLostError(f"{self._loss}, and a streaming-input session cannot move. Please open it again.")
        if move is Move.PINNED:
            return RequestLostError(
                f"{self._loss}, and with it what an earlier request had left there for this one. "
                "Please send both again."
            )
        if move is Move.NEVER:
            return RequestLostError(
                f"{self._loss}, after part of the answer had been delivered, and its transfer parameters are spent. "
                "Please send it again."
            )
        if move is Move.RESUME and vocabulary is not None and (token := max(self.produced)) >= vocabulary:
            # Such a prompt may crash an engine. Outputs are not checked earlier, since few become part of a prompt.
            return RequestLostError(
                f"{self._loss}, and had sent token id {token}, which the model's vocabulary of {vocabulary} does not "
                "have, so no other replica can go on with it. Please send it again."
            )
        if sum(loss.culprit is None for loss in self.losses) > migration_limit:
            return RequestLostError(
                f"{self._loss}; it had moved {migration_limit} times, the limit of --omni-migration-limit."
            )
        return None


class RunEnded(NamedTuple):
    """The end of a run otherwise than by its engine's last output; outputs in its place, or an error for the client."""

    run: StageRun
    outputs: Any | None = None
    error: OmniError | None = None


Accepted = tuple[StageRun, Any]
"""A run and an output of its current attempt."""
