"""The sessions that wait for a Python stage, and their order. Pure state, no I/O."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from vllm_omni_plugin.pipeline import StageInput
from vllm_omni_plugin.stages.python_stage import StageJob
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import StageRequest


@dataclass(slots=True, eq=False)
class StageSession:
    """A request. Its input may come in chunks (while `open`), which are answered one after the other."""

    request_id: str
    client_index: int
    open: bool
    memory: dict[str, Any] = field(default_factory=dict)
    waiting: deque[StageJob] = field(default_factory=deque)
    computing: bool = False
    answered: int = 0


_FAILED_TO_REMEMBER = 1024


class ComputeQueue:
    """The sessions of a stage: first come, first served, with at most one chunk of a session at a time."""

    def __init__(self) -> None:
        self._sessions: dict[str, StageSession] = {}
        self._ready: deque[StageSession] = deque()
        # Further chunks of a failed session may still arrive.
        self._failed: deque[str] = deque(maxlen=_FAILED_TO_REMEMBER)

    @property
    def waiting(self) -> int:
        """Number of sessions that have a chunk to compute and are not being computed."""
        return len(self._ready)

    @property
    def request_ids(self) -> list[str]:
        return list(self._sessions)

    def add(self, request: StageRequest) -> bool:
        """Add a request, or a chunk of its session. False for a duplicate id: the input of that session is complete."""
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
        """Remove and return the next batch. The caller must call `finish` for each of its sessions."""
        batch: list[tuple[StageSession, StageJob]] = []
        while self._ready and len(batch) < limit:
            session = self._ready.popleft()
            session.computing = True
            batch.append((session, session.waiting.popleft()))
        return batch

    def finish(self, session: StageSession, failed: bool) -> bool:
        """End the computation of a chunk; a failure ends the session. Returns whether to send the output."""
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
        """Remove sessions, also those that are being computed, and return them. Unknown ids are ignored."""
        dropped = [session for name in request_ids if (session := self._sessions.pop(name, None)) is not None]
        if dropped:
            self._ready = deque(session for session in self._ready if session.request_id in self._sessions)
        return dropped

    def _forget_if_over(self, session: StageSession) -> None:
        if not (session.open or session.waiting or session.computing):
            self._sessions.pop(session.request_id, None)


def _job(request: StageRequest, memory: dict[str, Any]) -> StageJob:
    given = StageInput(request.token_ids, request.text, request.tensor, request.metadata, request.sampling)
    return StageJob(given, memory, request.last or not request.resumable)
