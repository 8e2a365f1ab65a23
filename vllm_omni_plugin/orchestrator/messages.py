"""What crosses between AsyncLLM's event loop and the orchestrator's."""

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class SubmitRequest:
    """A new request, or the next chunk of a streaming-input one.

    Attributes:
        request: vLLM's `EngineCoreRequest`; the orchestrator reads it and never changes it.
        submitted_at: monotonic seconds at which the client handed it over.
    """

    request: Any
    submitted_at: float


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """The client no longer wants these requests; nothing more is delivered for them."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request ends with an error instead of a finish reason.

    Attributes:
        error: `NoReplicaError` or `RequestLostError`, worded for the API's user.
    """

    request_id: str
    error: Exception


@dataclass(frozen=True, slots=True)
class CallReplicas:
    """A utility call for every replica of every stage.

    Attributes:
        method: method of vLLM's engine core.
        args: its positional arguments, plain data or structs that vLLM's encoder knows.
        reply: receives a list of results, one per replica that answered in replica order, or the error.
    """

    method: str
    args: tuple[Any, ...]
    reply: "Future[list[Any]]"
