"""Workloads above the capacity of a fleet, by name. Not used to rank policies: refused requests have no latency."""

import random
from collections.abc import Iterator, Mapping
from functools import partial
from heapq import merge
from itertools import islice

from simulator.requests import Session
from simulator.traffic import Requests, length, poisson, tokens
from simulator.workload import MakeWorkload, Scale, Workload
from vllm_omni_plugin.admission import AdmissionConfig, RequestClass, RequestTerms

DEADLINE_S = 2.0
_PROMPT, _OUTPUT = 512, 128
_CALM, _FLOOD = 0.3, 5.0
_CAPACITY = 1.4
"""Throughput of a saturated fleet, as a multiple of `Scale.rate(1)`: its batches are larger."""
_ADMISSION = AdmissionConfig(classes=(RequestClass(name="interactive", deadline=DEADLINE_S),))


def overload(scale: Scale, load: float) -> Workload:
    """The requests of `steady` at this multiple of the capacity; the deadline is two seconds to the first token."""
    rng = random.Random(scale.seed)
    return Workload(_sessions(scale, load, scale.requests, "", rng), admission=_ADMISSION)


def calm(scale: Scale) -> Workload:
    """A tenant that sends 0.3 times the capacity, alone."""
    rng = random.Random(scale.seed)
    count = round(scale.requests * _CALM / (_CALM + _FLOOD))
    return Workload(_sessions(scale, _CALM, count, "calm", rng), admission=_ADMISSION, measured_tenant="calm")


def flood(scale: Scale) -> Workload:
    """The tenant of `calm`, whose requests are measured, beside a tenant that sends 5 times the capacity."""
    quiet = calm(scale).sessions
    rng = random.Random(scale.seed + 1)
    count = round(scale.requests * _FLOOD / (_CALM + _FLOOD))
    loud = _sessions(scale, _FLOOD, count, "flood", rng)
    return Workload(
        merge(quiet, loud, key=lambda session: session.starts), admission=_ADMISSION, measured_tenant="calm"
    )


def _sessions(scale: Scale, load: float, count: int, tenant: str, rng: random.Random) -> Iterator[Session]:
    # Different numbers, because both tenants' requests come to one head.
    requests = Requests(rng, RequestTerms(tenant), first=0 if tenant != "flood" else scale.requests)
    for start in islice(poisson(rng, scale.rate(_CAPACITY * load, _PROMPT, _OUTPUT)), count):
        prompt = tokens(rng, length(rng, _PROMPT, 0.5, 2048))
        yield Session(start, [requests.make(prompt, length(rng, _OUTPUT, 0.5, 512), 512)])


OVERLOADS: Mapping[str, MakeWorkload] = {
    **{f"overload-{load:g}x": partial(overload, load=load) for load in (1.5, 2.0, 4.0)},
    "calm": calm,
    "flood": flood,
}
