"""Admission control: the order of waiting requests, and refusals, by classes, tenants, bounds and deadlines.

Uses neither vLLM nor sockets, threads or clocks: time is an argument. Start with `admission`.
"""

from vllm_omni_plugin.admission.admission import NO_QUEUE, Admission, QueuePosition, RefusalReason, TenantReport
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
from vllm_omni_plugin.admission.ticket import RequestTerms, Ticket, TicketPhase
from vllm_omni_plugin.admission.wait_queue import StageView

__all__ = [
    "NO_QUEUE",
    "Admission",
    "AdmissionConfig",
    "Backlog",
    "IndexedHeap",
    "QueueBounds",
    "QueuePosition",
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
