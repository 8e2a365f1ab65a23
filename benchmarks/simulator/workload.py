"""The parts of a workload."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from simulator.requests import Session
from vllm_omni_plugin.admission import AdmissionConfig
from vllm_omni_plugin.sim import EngineSettings


@dataclass(frozen=True, slots=True)
class Incident:
    """A fault or a drain of one replica.

    Attributes:
        kind: `die` loses the running requests, `leave` finishes them first; both come back with an empty cache. `slow`
            makes the replica slower for good.
        until: seconds at which the replica is back.
        factor: how much slower it becomes.
    """

    at: float
    kind: Literal["die", "leave", "slow"]
    replica: int
    until: float = 0.0
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests and incidents of one run. Not reusable, because requests store their results.

    Attributes:
        sessions: in order of their starts.
        admission: the admission config of heads that queue requests; None: no admission control.
        measured_tenant: only its requests count in the results; None: all requests.
    """

    sessions: Iterable[Session]
    incidents: Sequence[Incident] = ()
    admission: AdmissionConfig | None = None
    measured_tenant: str | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """The size of a workload.

    Attributes:
        requests: approximate number.
        seed: the same seed gives the same workload.
    """

    replicas: int
    requests: int
    settings: EngineSettings
    seed: int = 0

    def rate(self, utilisation: float, prompt_tokens: float, output_tokens: float) -> float:
        """Requests per second that keep the fleet busy for this share of the time. At 1 and above it cannot keep up.

        Args:
            prompt_tokens: computed tokens of a prompt, without those that could be cached.
        """
        settings = self.settings
        each = prompt_tokens * settings.prefill_token_s
        each += output_tokens * (settings.sequence_s + settings.step_s / _TYPICAL_BATCH)
        return utilisation * self.replicas / each

    def alone_s(self, prompt_tokens: int, output_tokens: int) -> float:
        """Seconds that a request takes in an idle replica."""
        settings = self.settings
        return settings.duration(prompt_tokens, 0) + output_tokens * settings.duration(0, 1)


_TYPICAL_BATCH = 24
"""Sequences per iteration in a replica that is busy but keeps up."""

MakeWorkload = Callable[[Scale], Workload]
