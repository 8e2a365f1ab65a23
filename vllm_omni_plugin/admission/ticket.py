"""One request's place in the order of all that wait."""

from enum import IntEnum
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from vllm_omni_plugin.admission.tenant_accounts import TenantAccount


class TicketPhase(IntEnum):
    """How far a request has come, as far as admission is concerned."""

    NEW = 0
    WAITING = 1
    STARTED = 2
    ENDED = 3
    ADMITTED = 4
    """It has waited, and is to go on or to wait elsewhere without being judged again."""


class Ticket(Struct, order=True):
    """A place in the order, fixed when the request comes. The lower one goes first; no two are equal.

    Attributes:
        class_index: place of its class; lower ones go first.
        priority: OpenAI's, as vLLM reads it: lower ones go first.
        start_tag: where it begins in the fair order of its class, in tokens per weight.
        number: counts up with each ticket of a head.
        tenant: whose request it is.
        tokens: of its prompt.
        dispatch_by: monotonic seconds by which an engine must have got it first; None: no limit.
        deadline: monotonic seconds by which its first token must come; None likewise.
        class_name: its class.
        cost: tokens that it is charged for while its answer's length is not known.
        virtual_cost: what its tenant's next request was put back for it, in tokens per weight.
        phase: how far it has come.
    """

    class_index: int
    priority: int
    start_tag: float
    number: int
    tenant: TenantAccount
    tokens: int
    dispatch_by: float | None
    deadline: float | None
    class_name: str
    cost: float
    virtual_cost: float
    phase: TicketPhase = TicketPhase.NEW

    def for_later_stage(self) -> Self:
        """The same place, for work on the request at a stage where nobody is refused."""
        return replace(self, phase=TicketPhase.STARTED, dispatch_by=None, deadline=None)
