"""Who waits before whom for an engine, and who is refused: classes, tenants, bounds, deadlines, and their file.

Knows neither vLLM nor sockets, threads or clocks: time is an argument. Start with `admission`.
"""

from vllm_omni_plugin.admission.admission import Admission, Standing, TenantReport
from vllm_omni_plugin.admission.class_queue import Backlog
from vllm_omni_plugin.admission.order import Order
from vllm_omni_plugin.admission.plan import AdmissionPlan, Bounds, RequestClass, TenantSettings, changes
from vllm_omni_plugin.admission.plan_file import load_admission
from vllm_omni_plugin.admission.queues import StageState
from vllm_omni_plugin.admission.terms import Reason, Refusal, Terms
from vllm_omni_plugin.admission.ticket import Phase, Ticket

__all__ = [
    "Admission",
    "AdmissionPlan",
    "Backlog",
    "Bounds",
    "Order",
    "Phase",
    "Reason",
    "Refusal",
    "RequestClass",
    "StageState",
    "Standing",
    "TenantReport",
    "TenantSettings",
    "Terms",
    "Ticket",
    "changes",
    "load_admission",
]
