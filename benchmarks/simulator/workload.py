"""What a workload consists of."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from simulator.requests import Session
from vllm_omni_plugin.admission import AdmissionConfig
from vllm_omni_plugin.sim import EngineSettings


@dataclass(frozen=True, slots=True)
class Incident:
    """What befalls one replica.

    Attributes:
        at: seconds.
        kind: `die` loses what runs there; `leave` finishes it first; both come back with an empty cache. `slow` stays.
        replica: its number.
        until: seconds at which it is back.
        factor: how much slower it is from then on.
    """

    at: float
    kind: Literal["die", "leave", "slow"]
    replica: int
    until: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests and incidents of one run; good for one run only, as requests note what becomes of them.

    Attributes:
        sessions: in the order in which they start.
        incidents: in any order.
        plan: who may come in at a head where requests wait; None: everybody.
        judged: the tenant whose requests alone count in the results; None: all.
    """

    sessions: Iterable[Session]
    incidents: Sequence[Incident] = ()
    plan: AdmissionConfig | None = None
    judged: str | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """How large a workload is to be.

    Attributes:
        replicas: replicas that shall be kept busy by it.
        requests: about how many requests.
        settings: what their engines are like.
        seed: the same seed gives the same workload.
    """

    replicas: int
    requests: int
    settings: EngineSettings
    seed: int = 0

    def rate(self, utilisation: float, prompt_tokens: float, output_tokens: float) -> float:
        """Requests per second that keep the fleet busy for this share of its time, if nothing is wasted.

        Args:
            utilisation: above 0; from 1 on the fleet cannot keep up.
            prompt_tokens: that are computed for a request, without those that could be cached.
            output_tokens: of its answer.
        """
        settings = self.settings
        each = prompt_tokens * settings.prefill_token_s
        each += output_tokens * (settings.sequence_s + settings.step_s / _TYPICAL_BATCH)
        return utilisation * self.replicas / each

    def alone_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Seconds that a request takes in a replica that has nothing else to do."""
        settings = self.settings
        return settings.duration(prompt_tokens, 0) + output_tokens * settings.duration(0, 1)


_TYPICAL_BATCH = 24
"""Sequences that share an iteration in a replica that has much to do but keeps up."""

MakeWorkload = Callable[[Scale], Workload]
