"""The errors of the plugin. Entry points map them to exit codes and HTTP status codes."""

from collections.abc import Iterable
from difflib import get_close_matches

SHUTTING_DOWN = "The server is shutting down."
"""The message for requests that arrive during shutdown."""


class OmniError(Exception):
    """Base of all errors that this package raises on purpose."""


class ConfigError(OmniError, ValueError):
    """A flag, file or combination is not valid. The message names it and says what to do."""


class RefusedByHeadError(OmniError):
    """The head would refuse this node's replicas. May be temporary: the head may be restarting."""


class WireError(OmniError, ValueError):
    """A frame from the network is not a valid message. Services drop the frame and go on."""


class ReplicaError(OmniError):
    """One replica failed a call. Other replicas are not affected."""


class AdapterFilesError(ReplicaError):
    """The files of an adapter are missing or have changed on this node. The engine is not affected."""


class MessageTooLargeError(ReplicaError):
    """A message is larger than the replica accepts. It was not sent; the replica goes on. The text names the flag."""


NOT_ALLOWED = "not allowed: "
"""Prefix of a replica server's answer to a call that it did not pass on to the engine."""


class NotAllowedError(ReplicaError):
    """The replica server did not pass the call on to its engine. The engine is not affected."""


class NoReplicaError(OmniError):
    """No replica of the stage can serve now. The request was never sent to a replica, so the client may retry it."""


class RequestRefusedError(OmniError):
    """Admission control refused the request. It never reached an engine, so the client may retry it.

    The HTTP status is 429 if the tenant is over its share or limits, 503 if the fleet is full; `reason` is for metrics.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s


class ServerUnavailableError(OmniError):
    """An HTTP server does not answer, or answers that it is not available now."""


class CoordinatorUnavailableError(OmniError):
    """An operator call cannot reach the other heads, or is one of too many. It may be repeated later."""


class RequestLostError(OmniError):
    """The replica of a request was lost, and the request could not move. Its output so far is valid."""


class QueryOfDeathError(RequestLostError):
    """Two engines crashed while they ran the request, so it is not sent to a third one."""


class RanksUnknownError(OmniError):
    """Trainers cannot know the ranks of the workers that would get weights."""


class NoExplanationError(OmniError):
    """The load-balancing policy cannot explain its choice."""


class StageError(OmniError):
    """A stage of a pipeline, or its transform, failed the request. The message names the stage."""


class StageInputError(StageError):
    """The input of a stage is not valid, for example a prompt that is too long for its model."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for an error message: `` (did you mean 'NAME'?)``, or "" if no known name is similar."""
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def text_of(error: BaseException) -> str:
    """The text of an error that a user's code raised, as UTF-8 can have it; "" if the error has none."""
    try:
        return str(error).encode(errors="backslashreplace").decode()
    except Exception:  # a user's `__str__` may raise anything
        return ""
