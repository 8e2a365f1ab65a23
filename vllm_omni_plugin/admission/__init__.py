"""Who waits before whom for an engine, and who is refused: classes, tenants, bounds, deadlines, and their file.

Uses neither vLLM nor sockets, threads or clocks: time is an argument. Start with `admission`.
"""

from vllm_omni_plugin.admission.admission import Admission, QueuePosition, TenantReport
from vllm_omni_plugin.admission.admission_config import (
    AdmissionConfig,
    QueueBounds,
    RequestClass,
    TenantSettings,
    config_changes,
    load_admission,
)
from vllm_omni_plugin.admission.class_queue import Backlog
from vllm_omni_plugin.admission.indexed_heap import IndexedHeap
from vllm_omni_plugin.admission.request_terms import Refusal, RefusalReason, RequestTerms
from vllm_omni_plugin.admission.ticket import Ticket, TicketPhase
from vllm_omni_plugin.admission.wait_queue import StageView

__all__ = [
    "Admission",
    "AdmissionConfig",
    "Backlog",
    "IndexedHeap",
    "QueueBounds",
    "QueuePosition",
    "Refusal",
    "RefusalReason",
    "RequestClass",
    "RequestTerms",
    "StageView",
    "TenantReport",
    "TenantSettings",
    "Ticket",
    "TicketPhase",
    "config_changes",
    "load_admission",
]
