"""What a client says of its request, and what it is told if the request is refused."""

from enum import StrEnum
from http import HTTPStatus
from typing import NamedTuple

from msgspec import Struct


class RequestTerms(Struct, frozen=True):
    """What a client said of one request beside its body.

    Attributes:
        tenant: on whose behalf it comes; "" if nobody was named.
        timeout_s: seconds that the client waits for the first token; None if it did not say.
    """

    tenant: str = ""
    timeout_s: float | None = None


class RefusalReason(StrEnum):
    """Why a request is refused, as in the label of the metric."""

    IN_FLIGHT = "in_flight"
    TOKEN_RATE = "token_rate"
    QUEUE_FULL = "queue_full"
    DEADLINE = "deadline"
    EVICTED = "pushed_out"


class Refusal(NamedTuple):
    """A request is not answered, or waits no longer.

    Attributes:
        status: 429: its tenant is over its share or its own limits; 503: the fleet has too much to do.
        reason: see `Reason`.
        message: for the client.
        retry_after_s: seconds after which the client may try again, from 1 to 60.
    """

    status: HTTPStatus
    reason: RefusalReason
    message: str
    retry_after_s: int
