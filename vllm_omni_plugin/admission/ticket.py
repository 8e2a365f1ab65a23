"""A request's place in the order of all waiting requests, and what its client said of it."""

from enum import IntEnum
from math import inf
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from vllm_omni_plugin.admission.tenant_accounts import TenantAccount


class RequestTerms(Struct, frozen=True):
    """What a client said of its request in headers: its tenant, "" if none, and the seconds that it waits for a token.

    `anonymous` clients have no valid API key, although the server has keys. All are one tenant, "", and none of their
    requests comes before others by its priority. `waited_s`: seconds from the arrival of the HTTP request until its
    first request to the fleet.
    """

    tenant: str = ""
    timeout_s: float | None = None
    anonymous: bool = False
    waited_s: float = 0.0

    def allowed_priority(self, priority: int) -> int:
        """The priority that counts, of OpenAI's; lower ones start first."""
        return max(0, priority) if self.anonymous else priority


class TicketPhase(IntEnum):
    """How far a request has come. One that HAS_WAITED may go on, or wait again for another replica, unchecked."""

    NEW = 0
    WAITING = 1
    HAS_WAITED = 2
    STARTED = 3
    ENDED = 4


class Ticket(Struct, order=True):
    """A place in the order, fixed at arrival. The lower ticket starts first; no two are equal.

    Lower classes and lower `priority`, OpenAI's as vLLM reads it, start first; then the lower `start_tag`, the virtual
    start time in the fair order of the class, in tokens per weight; then `number`, which increases at a head.

    `tokens` are of the prompt. An engine must have the request for the first time by `send_by`, and its first token
    must come by `deadline`: monotonic seconds or infinity. `cost` is estimated, in tokens of prompt and answer, until
    the answer's length is known; the tenant's next request starts later by `virtual_cost`, the cost per weight.
    """

    class_index: int
    priority: int
    start_tag: float
    number: int
    tenant: TenantAccount
    tokens: int
    send_by: float
    deadline: float
    class_name: str
    cost: float
    virtual_cost: float
    phase: TicketPhase = TicketPhase.NEW

    def for_later_stage(self) -> Self:
        """The same place for a later stage of a pipeline, where no request is refused."""
        return replace(self, phase=TicketPhase.STARTED, send_by=inf, deadline=inf)
