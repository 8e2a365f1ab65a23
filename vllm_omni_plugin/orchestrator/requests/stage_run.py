"""What one stage does for one request, as a state machine whose transitions do no I/O."""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple, Protocol

from vllm_omni_plugin.admission import Ticket
from vllm_omni_plugin.balancing import Decision, Task
from vllm_omni_plugin.errors import NoReplicaError, OmniError, QueryOfDeathError, RequestLostError
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import Dispatches
from vllm_omni_plugin.vllm_api.requests.engine_types import Move


class RequestPhase(Enum):
    """Where a request is."""

    QUEUED = "queued"
    """Accepted, with no replica yet."""
    DISPATCHED = "dispatched"
    """Sent to a replica that has not answered."""
    STREAMING = "streaming"
    """The current replica's output goes to the client."""
    MOVING = "moving"
    """Its replica was lost, and it has no other one yet."""
    FINISHED = "finished"
    """Ended in any way; nothing more may be delivered."""


_UNDECIDED = Decision(0, "")


class LostReplica(Protocol):
    """A `PoolMember`. One that gets the id of another later on is not the same."""

    replica_id: int
    name: str

    @property
    def machine(self) -> str:
        """See there."""


@dataclass(slots=True, eq=False)
class Loss:
    """The loss of one replica, the same for all requests that were in flight on it.

    Attributes:
        replica: the replica.
        reason: why it is gone, for errors.
        requests: how many of this head's were in flight there.
        others: how many of other heads', as far as they have said.
        culprit: the request that its engine died of; None: there is none, or it is not known.
    """

    replica: LostReplica
    reason: str
    requests: int = 0
    others: int = 0
    culprit: "StageRun | None" = None


@dataclass(slots=True, eq=False)
class StreamingInputState:
    """A session whose prompt arrives in chunks, each answered by a turn of output.

    The engine keeps the session between its turns, and ends it after the last turn once the input is closed.

    Attributes:
        replayable: whether chunks are kept, so that the session can move. Those of a client are not: they may have no
            end.
        open_turns: chunks submitted whose turn has not finished.
        input_closed: the last chunk has come.
        unsent: chunks after the first that wait for a replica.
        sent: those that a replica has got, of a replayable session.
    """

    replayable: bool = False
    open_turns: int = 1
    input_closed: bool = False
    unsent: list[Any] = field(default_factory=list)
    sent: list[Any] = field(default_factory=list)

    @property
    def over(self) -> bool:
        """Whether the engine has nothing more to say in this session."""
        return self.input_closed and self.open_turns == 0

    def take_unsent(self) -> list[Any]:
        """What waits to be sent, which counts as sent from here on."""
        chunks, self.unsent = self.unsent, []
        self.note_sent(*chunks)
        return chunks

    def note_sent(self, *chunks: Any) -> None:
        """These have gone to the replica."""
        if self.replayable:
            self.sent.extend(chunks)

    def rewind(self) -> None:
        """All turns are to come again."""
        self.unsent, self.sent = [*self.sent, *self.unsent], []
        self.open_turns = 1 + sum(chunk.resumable for chunk in self.unsent)


@dataclass(slots=True, eq=False, repr=False)
class StageRun:
    """A stage's work on one request, from its input to its end, over all attempts.

    Attributes:
        request_id: the id under which the client knows the request.
        request: vLLM's `EngineCoreRequest`, or what stands for it in a stage of another kind.
        submitted_at: monotonic seconds at which it was submitted.
        phase: see `RequestPhase`; changed by the methods below only.
        replica_id: the replica of the current attempt, or None.
        engine_request_id: the id of the current attempt on its engine, new for every attempt.
        attempts: how often a replica has got the request.
        sent: whether the replica has got the current attempt.
        streaming: state of a streaming-input session, or None for an ordinary request.
        produced: tokens delivered so far, over all attempts.
        move: how the current attempt continues the ones before it.
        joining: whether the current attempt has yet to reach the end of what was delivered.
        waits_since: monotonic seconds at which the request began to wait for a replica that serves.
        dispatches: see `SubmitRequest`.
        first_request: what the first replica gets in place of `request`, if anything.
        ticket: its place in the order of all; None in simulations without one.
        dispatched_at: monotonic seconds at which a replica got it for the first time; None before.
        losses: of the replicas that it has lost, and that had got it.
        losses_excused: those of them that do not count for the limit: crashes that a request of another head is the
            likelier cause of.
        suspicions: those of them that were crashes of engines that had got it, see `Suspects`.
        trial_outputs: new outputs that it has had since the last of these, as far as they are counted.
        closed: whether it has left its dispatcher, which keeps nothing of it any more.
        task: what the policy was told of the last attempt.
        affinity_key: see `EngineApi.describe`.
        decision: what it answered.
        attempt_at: monotonic seconds at which the last attempt was charged to its replica.
        answer_begins: how many of the tokens produced before that attempt are in the prompt that it sent.
        prompt_tokens: tokens of that prompt.
        prefill_tokens: those of them that count as still to be computed until the first output.
        began: whether the attempt's first output has come.
        output_tokens: tokens that the engine has produced in it.
    """

    request_id: str
    request: Any
    submitted_at: float
    phase: RequestPhase = RequestPhase.QUEUED
    replica_id: int | None = None
    engine_request_id: str = ""
    attempts: int = 0
    sent: bool = False
    streaming: StreamingInputState | None = None
    produced: "array[int]" = field(default_factory=partial(array, "q"))
    move: Move = Move.RESTART
    joining: bool = False
    waits_since: float = 0.0
    dispatches: Dispatches | None = None
    first_request: Any = None
    ticket: Ticket | None = None
    dispatched_at: float | None = None
    losses: list[Loss] = field(default_factory=list)
    losses_excused: list[Loss] = field(default_factory=list)
    suspicions: list[Loss] = field(default_factory=list)
    trial_outputs: int = 0
    closed: bool = field(default=False, init=False)
    task: Task = field(default_factory=Task, init=False)
    affinity_key: int | None = field(default=None, init=False)
    decision: Decision = field(default=_UNDECIDED, init=False)
    attempt_at: float = field(default=0.0, init=False)
    answer_begins: int = field(default=0, init=False)
    prompt_tokens: int = field(default=0, init=False)
    prefill_tokens: int = field(default=0, init=False)
    began: bool = field(default=False, init=False)
    output_tokens: int = field(default=0, init=False)
    _to_swallow: int = field(default=0, init=False)
    _loss: str = field(default="", init=False)

    def __repr__(self) -> str:
        return f"request {self.request_id} is {self.phase.value}"

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.phase is RequestPhase.FINISHED

    @property
    def confined_to(self) -> set[LostReplica]:
        """The only replicas to which it may go: two that have crashed under it, whoever was to blame; empty: all."""
        crashed = {loss.replica for loss in self.suspicions}
        return crashed if len(crashed) > 1 else set()

    @property
    def suspected(self) -> list[Loss]:
        """The losses that it may have caused: those `suspicions` of which no request is known to be the culprit."""
        return [loss for loss in self.suspicions if loss.culprit is None] if self.suspicions else []

    def dispatch(self, replica_id: int, engine_request_id: str, task: Task, decision: Decision, now: float) -> None:
        """Bind the next attempt to a replica, before it is charged there and sent.

        Args:
            replica_id: the replica.
            engine_request_id: new for every attempt.
            task: what the policy was asked.
            decision: what it answered.
            now: monotonic seconds.
        """
        assert self.phase in (RequestPhase.QUEUED, RequestPhase.MOVING), self
        self.phase = RequestPhase.DISPATCHED
        self.replica_id = replica_id
        self.engine_request_id = engine_request_id
        self.sent = self.began = False
        self.task, self.decision, self.attempt_at = task, decision, now
        prompt = task.get("prompt")
        self.prompt_tokens = len(prompt.token_ids) if prompt is not None else 0
        self.prefill_tokens = max(0, self.prompt_tokens - decision.matched_tokens)
        self.output_tokens = 0
        self.answer_begins = len(self.produced) if self.move is Move.RESUME else 0

    def join(self, tokens: Sequence[int], finished: bool) -> int:
        """Output of a moved request came: find where what was delivered ends in it.

        Args:
            tokens: the output's.
            finished: whether it is the attempt's last.

        Returns:
            How many of its tokens the client has already; all of them may be.

        Raises:
            RequestLostError: the replay differs from what was delivered. The request has ended with this error.
        """
        assert self.phase is RequestPhase.DISPATCHED, self
        swallow = min(self._to_swallow, len(tokens))
        begin = len(self.produced) - self._to_swallow
        self._to_swallow -= swallow
        repeats = self.produced[begin : begin + swallow].tolist() == list(tokens[:swallow])
        if not repeats or (finished and self._to_swallow and self.streaming is None):
            self.phase = RequestPhase.FINISHED
            raise RequestLostError(
                f"{self._loss}, and the replica that took over did not repeat the part of the answer that had been "
                "delivered. Please send it again."
            )
        all_known = swallow == len(tokens)
        if self.streaming is None:
            self.joining = all_known and not finished
            return swallow
        self.joining = all_known
        if all_known and finished:
            # The end of a turn comes with its last token, so it has been delivered, too.
            self._end_turn(self.streaming)
        return swallow

    def _end_turn(self, session: StreamingInputState) -> None:
        session.open_turns -= 1
        if session.over:
            self.phase = RequestPhase.FINISHED

    def deliver(self, tokens: Sequence[int], finished: bool, cut_short: bool = False) -> None:
        """Output of the current attempt goes to the client.

        Args:
            tokens: the output's.
            finished: it is the last, or the last of a streaming-input session's turn.
            cut_short: with `finished`, no turn of the session will follow.
        """
        if self.phase is not RequestPhase.STREAMING:
            assert self.phase is RequestPhase.DISPATCHED, self
            self.phase = RequestPhase.STREAMING
        self.produced.extend(tokens)
        if not finished:
            return
        if self.streaming is not None and not cut_short:
            self._end_turn(self.streaming)
        else:
            self.phase = RequestPhase.FINISHED

    def add_chunk(self, chunk: Any) -> None:
        """A further chunk of a streaming-input session was submitted; one that is not resumable closes the input."""
        assert self.streaming is not None
        if chunk.resumable:
            self.streaming.open_turns += 1
        else:
            self.streaming.input_closed = True
        if self.streaming.over:
            self.phase = RequestPhase.FINISHED

    def abort(self) -> None:
        """The client gave up. Nothing to do if the request has ended."""
        self.phase = RequestPhase.FINISHED

    def lose_replica(
        self, loss: Loss, migration_limit: int, on_delivered: Move, vocabulary: int | None = None
    ) -> RequestLostError | None:
        """The replica that had got the current attempt is gone: the request goes on at another one, as `move` says.

        Args:
            loss: which replica, and why.
            migration_limit: moves a request may make in its life, without those for which another one is to blame, and
                those of `losses_excused`.
            on_delivered: how this request can go on if part of its answer has been delivered, or `PINNED`.
            vocabulary: see `EngineApi`.

        Returns:
            What the request has ended with, if it cannot go on.
        """
        assert self.phase in (RequestPhase.DISPATCHED, RequestPhase.STREAMING), self
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
        self.joining = move is not Move.RESTART
        self._to_swallow = len(self.produced) if move is Move.REPLAY else 0
        if self.streaming is not None:
            self.streaming.rewind()
        return None

    def refuse(self) -> None:
        """The replica has not got or not taken the current attempt, and keeps nothing of it."""
        assert self.phase is RequestPhase.DISPATCHED, self
        self.phase = RequestPhase.MOVING
        self.replica_id = None
        self.engine_request_id = ""
        if self.streaming is not None:
            self.streaming.rewind()

    def give_up(self, error: NoReplicaError) -> OmniError:
        """No replica can take the request. Returns what it has ended with."""
        assert self.phase in (RequestPhase.QUEUED, RequestPhase.MOVING), self
        self.phase = RequestPhase.FINISHED
        if self.confined_to:
            return self.query_of_death()
        if self.produced:
            return RequestLostError(f"{self._loss}, after part of the answer had been delivered. {error}")
        return error

    def query_of_death(self) -> QueryOfDeathError:
        """The error of a request that gets no third replica because engines may have died of it."""
        which = ", ".join(f"replica {loss.replica.replica_id} ({loss.reason})" for loss in self.suspicions)
        return QueryOfDeathError(
            f"{len(self.suspicions)} engines died while they ran this request: {which}. They may have died of it, so "
            "it gets no third replica."
        )

    def _why_not_movable(self, move: Move, migration_limit: int, vocabulary: int | None) -> RequestLostError | None:
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
            # An engine may die of such a prompt. Engines' outputs are not checked, since most never become one.
            return RequestLostError(
                f"{self._loss}, and had sent token id {token}, which the model's vocabulary of {vocabulary} does not "
                "have, so no other replica can go on with it. Please send it again."
            )
        if sum(loss.culprit is None and loss not in self.losses_excused for loss in self.losses) > migration_limit:
            return RequestLostError(
                f"{self._loss}; it had moved {migration_limit} times, the limit of --omni-migration-limit."
            )
        return None


class RunEnded(NamedTuple):
    """A run has ended otherwise than by its engine's last output.

    Attributes:
        run: the run.
        outputs: `EngineCoreOutputs` in place of that, if any.
        error: what it has ended with, if it failed.
    """

    run: StageRun
    outputs: Any | None = None
    error: OmniError | None = None


Accepted = tuple[StageRun, Any]
"""A run and an output of its current attempt."""
