"""Events of the fleet as this head sees them: each is one line of the log, and the last 1,000 are kept."""

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from itertools import count, takewhile

from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember

logger = init_logger(__name__)

MAX_EVENTS = 1000
MAX_REASON = 1000
"""Characters. Reasons may come from replicas, and are kept and sent to all viewers."""


class EventKind(StrEnum):
    ATTACH = "attach"
    DETACH = "detach"
    STALL = "stall"
    LOST = "lost"
    MOVE = "move"
    DRAIN = "drain"
    RESUME = "resume"
    REFUSE = "refuse"
    RESTART = "restart"
    QUERY_OF_DEATH = "query_of_death"
    OLD_WEIGHTS = "old_weights"


_LINES = {
    EventKind.ATTACH: (logging.INFO, "%(who)s serves (%(reason)s)."),
    EventKind.DETACH: (logging.INFO, "%(who)s has left: %(reason)s."),
    EventKind.STALL: (
        logging.ERROR,
        "%(who)s has stalled with %(requests)d requests in flight: %(reason)s. It serves again once a request that is "
        "tried there gets a token.",
    ),
    EventKind.LOST: (logging.ERROR, "%(who)s is lost (%(reason)s) with %(requests)d requests in flight."),
    EventKind.MOVE: (logging.INFO, "%(who)s is lost: %(requests)d of its requests continue once others take them."),
    EventKind.DRAIN: (logging.INFO, "%(who)s gets no new requests: %(reason)s."),
    EventKind.RESUME: (logging.INFO, "%(who)s may get new requests again: %(reason)s."),
    EventKind.REFUSE: (logging.WARNING, "%(who)s cannot be attached to: %(reason)s"),
    EventKind.RESTART: (logging.WARNING, "%(who)s is restarted %(reason)s"),
    EventKind.QUERY_OF_DEATH: (logging.ERROR, "A request gets no third replica: %(reason)s."),
    EventKind.OLD_WEIGHTS: (logging.ERROR, "No replica that has the updated weights is left: %(reason)s."),
}


@dataclass(frozen=True, slots=True)
class FleetEvent:
    """An event of one replica, of a stage, or of the head, which concerns some requests.

    Its id is `<log>-<number>`, from 1, its time in unix seconds, its replica `<stage>.<replica>`.
    """

    id: str
    time: float
    kind: EventKind
    stage: int | None
    replica: str | None
    reason: str
    requests: int


class EventLog:
    """Logs events, and keeps the last `MAX_EVENTS`. May be used from any thread.

    Its name begins all its ids; a random one is different in each process. `on_event` is called on the thread of the
    event.
    """

    def __init__(self, clock: Callable[[], float] = time.time, name: str | None = None) -> None:
        self._clock = clock
        self._name = secrets.token_hex(4) if name is None else name
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._events: deque[FleetEvent] = deque(maxlen=MAX_EVENTS)
        self.on_event: Callable[[], object] | None = None

    def record(
        self,
        kind: EventKind,
        reason: str,
        replica: PoolMember | None = None,
        *,
        stage: int | None = None,
        requests: int = 0,
        level: int | None = None,
    ) -> None:
        """Record an event of a replica, of a stage, or of this head; `reason` ends the sentence of the log line.

        `stage` is for a replica without an id here. `level` is that of the kind by default.
        """
        name = None if replica is None else replica.name
        stage = stage if replica is None else replica.stage_id
        reason = " ".join(reason[:MAX_REASON].splitlines())
        with self._lock:
            event_id = f"{self._name}-{next(self._numbers)}"
            self._events.append(FleetEvent(event_id, self._clock(), kind, stage, name, reason, requests))
        usual, line = _LINES[kind]
        # Fields for JSON log formatters.
        fields = {"omni_event": kind.value, "omni_stage": stage, "omni_replica": name, "omni_requests": requests}
        values = {"who": _subject(name, stage), "reason": reason, "requests": requests}
        logger.log(usual if level is None else level, line, values, extra=fields, stacklevel=2)
        if (on_event := self.on_event) is not None:
            on_event()

    def after(self, event_id: str = "") -> list[FleetEvent]:
        """The events after this one, oldest first; all events if this id is unknown."""
        with self._lock:
            events = tuple(self._events)
        return list(takewhile(lambda event: event.id != event_id, reversed(events)))[::-1]


def _subject(replica: str | None, stage: int | None) -> str:
    if replica is not None:
        return f"Replica {replica}"
    return "This head" if stage is None else f"A replica of stage {stage}"
