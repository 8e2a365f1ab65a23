"""What waits for a stage, in which order it is computed, and who is answered. Pure state, no I/O."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_plugin.pipeline.transfer import StageInput
from vllm_omni_plugin.stages.python_stage import StageJob
from vllm_omni_plugin.vllm_api.protocol.stage_protocol import StageRequest


@dataclass(slots=True, eq=False)
class StageSession:
    """A request, whose input may come in chunks that are answered one after the other.

    Attributes:
        client_index: who is answered.
        open: further chunks may come.
        waiting: chunks that are not being computed.
        answered: outputs so far.
    """

    request_id: str
    client_index: int
    open: bool
    memory: dict[str, Any] = field(default_factory=dict)
    waiting: deque[StageJob] = field(default_factory=deque)
    computing: bool = False
    answered: int = 0

    @property
    def over(self) -> bool:
        """Whether no further output will come in it."""
        return not (self.open or self.waiting or self.computing)


_FAILED_TO_REMEMBER = 1024


class ComputeQueue:
    """The sessions of a stage. First come, first served, and at most one chunk of a session at a time."""

    def __init__(self) -> None:
        self._sessions: dict[str, StageSession] = {}
        self._ready: deque[StageSession] = deque()
        # Chunks may be on their way to a session that has just failed.
        self._failed: deque[str] = deque(maxlen=_FAILED_TO_REMEMBER)

    @property
    def waiting(self) -> int:
        """Sessions with something to compute that is not being computed."""
        return len(self._ready)

    @property
    def request_ids(self) -> list[str]:
        """Ids of all sessions."""
        return list(self._sessions)

    def add(self, request: StageRequest) -> bool:
        """Take a request or a further chunk. False if it cannot be one, since the id is that of a finished input."""
        session = self._sessions.get(request.request_id)
        if session is None:
            if request.closing or request.request_id in self._failed:
                return True
            session = StageSession(request.request_id, request.client_index, request.resumable)
            self._sessions[request.request_id] = session
        elif not session.open:
            return False
        session.open = request.resumable
        if not request.closing:
            session.waiting.append(_job(request, session.memory))
            if len(session.waiting) == 1 and not session.computing:
                self._ready.append(session)
        self._forget_if_over(session)
        return True

    def take(self, limit: int) -> list[tuple[StageSession, StageJob]]:
        """The next batch; the caller calls `finish` for each of its sessions."""
        batch: list[tuple[StageSession, StageJob]] = []
        while self._ready and len(batch) < limit:
            session = self._ready.popleft()
            session.computing = True
            batch.append((session, session.waiting.popleft()))
        return batch

    def finish(self, session: StageSession, failed: bool) -> bool:
        """A chunk was computed; one that failed ends its session. Returns whether anybody still wants to know."""
        session.computing = False
        if self._sessions.get(session.request_id) is not session:
            return False
        if failed:
            del self._sessions[session.request_id]
            if session.open:
                self._failed.append(session.request_id)
            return True
        session.answered += 1
        if session.waiting:
            self._ready.append(session)
        self._forget_if_over(session)
        return True

    def abort(self, request_ids: Iterable[str]) -> list[StageSession]:
        """Drop sessions; what is being computed of them is no longer wanted. Returns those that there were."""
        dropped = [session for name in request_ids if (session := self._sessions.pop(name, None)) is not None]
        if dropped:
            self._ready = deque(session for session in self._ready if session.request_id in self._sessions)
        return dropped

    def _forget_if_over(self, session: StageSession) -> None:
        if session.over:
            self._sessions.pop(session.request_id, None)


def _job(request: StageRequest, memory: dict[str, Any]) -> StageJob:
    given = StageInput(request.token_ids, request.text, request.tensor, request.metadata, request.sampling)
    return StageJob(given, memory, request.last or not request.resumable)
