"""A stage as admission sees it, and requests that come, wait and end."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from heapq import heapify, heappop

from vllm_omni_plugin.admission import Admission, AdmissionConfig, Backlog, RequestTerms, Ticket
from vllm_omni_plugin.errors import RequestRefusedError


@dataclass
class FakeStage:
    """A `StageView` with values of the test."""

    send_rate: float = 0.0
    unstarted: int = 0
    first_output_s: float = 0.0
    heads: int = 1
    other_heads_backlog: Mapping[str, Backlog] = field(default_factory=dict)


def admission(config: AdmissionConfig | None = None, **stage: object) -> Admission:
    return Admission(config or AdmissionConfig(), FakeStage(**stage))  # type: ignore[arg-type]


def come(
    admission: Admission, tenant: str = "", tokens: int = 100, priority: int = 0, now: float = 0.0, **terms: float
) -> Ticket:
    """A request comes and waits; no request is refused."""
    ticket, outcome = try_to_come(admission, tenant, tokens, priority, now, **terms)
    assert outcome == []
    assert isinstance(ticket, Ticket)
    return ticket


def try_to_come(
    admission: Admission, tenant: str = "", tokens: int = 100, priority: int = 0, now: float = 0.0, **terms: float
) -> tuple[Ticket, RequestRefusedError | list[tuple[Ticket, RequestRefusedError]]]:
    """A request comes and is enqueued: its ticket, and the result of `enqueue`."""
    ticket = admission.new_ticket(RequestTerms(tenant, **terms), priority, tokens, now)
    assert isinstance(ticket, Ticket)
    return ticket, admission.enqueue(ticket, now)


def served(admission: Admission, tickets: Iterable[Ticket], output_tokens: int = 0) -> list[Ticket]:
    """Start and end all waiting requests in order."""
    waiting = list(tickets)
    heapify(waiting)
    order = []
    while waiting:
        order.append(heappop(waiting))
        admission.started(order[-1])
        admission.ended(order[-1], output_tokens, 0.0)
    return order
