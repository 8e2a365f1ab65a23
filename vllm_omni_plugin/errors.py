"""The errors of the plugin. Each layer raises these; each edge maps them once to what its caller speaks."""

from collections.abc import Iterable
from difflib import get_close_matches

SHUTTING_DOWN = "The server is shutting down."
"""Why requests are refused that come when it has been told to end."""


class OmniError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(OmniError, ValueError):
    """A flag, file or combination that cannot be honoured. The message names it and says what to do."""


class RefusedByHeadError(OmniError):
    """A node's head would not take its replicas: not as they are, or not yet, as it may be started anew itself."""


class WireError(OmniError, ValueError):
    """A frame from the network that is not a valid message. Dropped by services, never raised out of their loops."""


class ReplicaError(OmniError):
    """One replica failed a call; the others are not affected."""


class MessageTooLargeError(ReplicaError):
    """A message is larger than a replica takes. It was not sent, and the replica serves on. Names the flag."""


NOT_ALLOWED = "not allowed: "
"""How the answer to a call begins that the server of a replica did not pass on."""


class NotAllowedError(ReplicaError):
    """A call that the server of a replica does not pass on to the engine, which is none the worse for it."""


class NoReplicaError(OmniError):
    """No replica of a stage can serve right now. The request was never dispatched and is safe to retry."""


class RequestRefusedError(OmniError):
    """More requests wait than can be answered in time. This one never reached an engine and is safe to retry.

    Args:
        status: of HTTP: 429 if its tenant is over its share or limits, 503 if the fleet is full.
        reason: in a word, the label of metrics.
        message: for the client.
        retry_after_s: seconds after which another try may be worth it.
    """

    def __init__(self, status: int, reason: str, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason
        self.retry_after_s = retry_after_s


class ServerUnavailableError(OmniError):
    """A server that was asked over HTTP is not there, or not now."""


class CoordinatorUnavailableError(OmniError):
    """An operator's call cannot reach the fleet's other heads, or gets no number. It is safe to repeat it later."""


class RequestLostError(OmniError):
    """The replica serving a request died and the request could not be moved exactly. Its output so far stands."""


class QueryOfDeathError(RequestLostError):
    """Two engines crashed while they ran a request, so it gets no third one."""


class NoExplanationError(OmniError):
    """A load-balancing policy cannot say why it would choose a replica."""


class StageError(OmniError):
    """A stage of a pipeline, or the transform in front of it, failed a request. The message names the stage."""


class StageInputError(StageError):
    """A stage cannot take what it would have to compute on, such as a prompt that is too long for its model."""


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A hint for an error message, `` (did you mean 'NAME'?)``; "" if no known name is similar."""
    close = get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
