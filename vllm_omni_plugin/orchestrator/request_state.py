"""The life of one request in the orchestrator, as a state machine whose transitions do no I/O."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from vllm_omni_plugin.errors import NoReplicaError, OmniError, RequestLostError


class RequestPhase(Enum):
    """Where a request is."""

    QUEUED = "queued"
    """Accepted, with no replica yet."""
    DISPATCHED = "dispatched"
    """Sent to a replica that has not answered."""
    STREAMING = "streaming"
    """The client has output of it."""
    FINISHED = "finished"
    """Ended in any way; nothing more may be delivered."""


@dataclass(frozen=True, slots=True)
class Redispatch:
    """Action: send the request to another replica, from its start."""


@dataclass(frozen=True, slots=True)
class Fail:
    """Action: end the request with this error."""

    error: OmniError


Action = Redispatch | Fail


@dataclass(slots=True, eq=False)
class StreamingInputState:
    """A session whose prompt arrives in chunks, each answered by a turn of output.

    The engine keeps the session between its turns, and ends it after the last turn once the input is closed.

    Attributes:
        open_turns: chunks submitted whose turn has not finished.
        input_closed: the client has sent its last chunk.
    """

    open_turns: int = 1
    input_closed: bool = False

    @property
    def over(self) -> bool:
        """Whether the engine has nothing more to say in this session."""
        return self.input_closed and self.open_turns == 0


@dataclass(slots=True, eq=False)
class OrchestratorRequestState:
    """One request from acceptance to its end.

    Attributes:
        request: vLLM's `EngineCoreRequest` as the client submitted it.
        submitted_at: monotonic seconds of the hand-over.
        phase: see `RequestPhase`; changed by the methods below only.
        replica_id: the replica of the current attempt, or None.
        engine_request_id: the id of the current attempt on its engine, new for every attempt.
        attempts: how often the request was dispatched.
        streaming: state of a streaming-input session, or None for an ordinary request.
    """

    request: Any
    submitted_at: float
    phase: RequestPhase = RequestPhase.QUEUED
    replica_id: int | None = None
    engine_request_id: str = ""
    attempts: int = 0
    streaming: StreamingInputState | None = None

    @property
    def request_id(self) -> str:
        """The id under which the client knows the request."""
        request_id: Final[str] = self.request.request_id
        return request_id

    @property
    def finished(self) -> bool:
        """Whether the request has ended."""
        return self.phase is RequestPhase.FINISHED

    def dispatch(self, replica_id: int, engine_request_id: str) -> None:
        """Bind the next attempt to a replica, before anything is sent."""
        self._require(RequestPhase.QUEUED)
        self.phase = RequestPhase.DISPATCHED
        self.replica_id = replica_id
        self.engine_request_id = engine_request_id
        self.attempts += 1

    def deliver(self, finished: bool, cut_short: bool = False) -> None:
        """Output of the current attempt goes to the client.

        Args:
            finished: it is the last, or the last of a streaming-input session's turn.
            cut_short: with `finished`, no turn of the session will follow.
        """
        self._require(RequestPhase.DISPATCHED, RequestPhase.STREAMING)
        if finished and self.streaming is not None and not cut_short:
            self.streaming.open_turns -= 1
            finished = self.streaming.over
        self.phase = RequestPhase.FINISHED if finished else RequestPhase.STREAMING

    def add_chunk(self, resumable: bool) -> None:
        """A further chunk of a streaming-input session was submitted; one that is not `resumable` closes the input."""
        assert self.streaming is not None
        if resumable:
            self.streaming.open_turns += 1
        else:
            self.streaming.input_closed = True
        if self.streaming.over:
            self.phase = RequestPhase.FINISHED

    def abort(self) -> None:
        """The client gave up. Nothing to do if the request has ended."""
        self.phase = RequestPhase.FINISHED

    def lose_replica(self, reason: str, migration_limit: int) -> Action:
        """The replica of the current attempt is gone.

        A request of which nothing was delivered starts again elsewhere: that is exact. Any other ends with one error.

        Args:
            reason: why the replica is gone, for the error.
            migration_limit: moves a request may make in its life.
        """
        self._require(RequestPhase.DISPATCHED, RequestPhase.STREAMING)
        replica_id = self.replica_id
        error = self._why_not_movable(replica_id, reason, migration_limit)
        if error is not None:
            self.phase = RequestPhase.FINISHED
            return Fail(error)
        self.phase = RequestPhase.QUEUED
        self.replica_id = None
        self.engine_request_id = ""
        return Redispatch()

    def refuse(self, error: NoReplicaError) -> Fail:
        """No replica can take the request."""
        self._require(RequestPhase.QUEUED)
        self.phase = RequestPhase.FINISHED
        return Fail(error)

    def _why_not_movable(self, replica_id: int | None, reason: str, migration_limit: int) -> RequestLostError | None:
        lost = f"Replica {replica_id} was lost while it served this request ({reason})"
        if self.phase is RequestPhase.STREAMING:
            return RequestLostError(f"{lost}, after part of the answer had been delivered. Please send it again.")
        if self.streaming is not None:
            return RequestLostError(f"{lost}, and a streaming-input session cannot move. Please open it again.")
        if self.attempts > migration_limit:
            return RequestLostError(
                f"{lost}; it had moved {self.attempts - 1} times, the limit of --omni-migration-limit."
            )
        return None

    def _require(self, *phases: RequestPhase) -> None:
        if self.phase not in phases:
            raise AssertionError(f"request {self.request_id} is {self.phase.value}")
