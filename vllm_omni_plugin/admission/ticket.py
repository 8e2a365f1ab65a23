"""One request's place in the order of all that wait."""

from enum import IntEnum
from typing import Self

from msgspec import Struct
from msgspec.structs import replace

from vllm_omni_plugin.admission.accounts import TenantAccount


class Phase(IntEnum):
    """How far a request has come, as far as admission is concerned."""

    NEW = 0
    WAITING = 1
    STARTED = 2
    OVER = 3
    LET_IN = 4
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
        due: monotonic seconds by which an engine must have got it for the first time; None: it may wait for ever.
        deadline: monotonic seconds by which its first token must come; None likewise.
        class_name: its class.
        cost: tokens that it is charged for while its answer's length is not known.
        charge: what its tenant's next request was put back for it, in tokens per weight.
        phase: how far it has come.
    """

    class_index: int
    priority: int
    start_tag: float
    number: int
    tenant: TenantAccount
    tokens: int
    due: float | None
    deadline: float | None
    class_name: str
    cost: float
    charge: float
    phase: Phase = Phase.NEW

    def follower(self) -> Self:
        """The same place, for work on the request at a stage where nobody is refused."""
        return replace(self, phase=Phase.STARTED, due=None, deadline=None)
