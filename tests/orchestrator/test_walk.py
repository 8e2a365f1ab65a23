"""How many calls a request needs to its replica, and an output to its client: docs/architecture.md says it."""

import sys
from types import FrameType
from typing import Any

from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admission import AdmissionConfig
from vllm_omni_plugin.balancing import Decision


class FirstReplica:
    """A policy that computes nothing."""

    def select(self, task: object, replicas: object) -> int:
        return 0

    def decide(self, task: object, replicas: object) -> Decision:
        return Decision(0, "first")


class Calls(list[str]):
    """Records the calls of the package's functions inside a `with` block."""

    def __enter__(self) -> "Calls":
        sys.setprofile(self._record)
        return self

    def __exit__(self, *args: object) -> None:
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("vllm_omni_plugin."):
            self.append(frame.f_code.co_qualname)

    def between(self, first: str, last: str) -> list[str]:
        """The calls from the first call of one function up to that of another."""
        return self[self.index(first) : self.index(last) + 1]


async def test_a_request_reaches_its_replica_in_25_calls_and_an_output_comes_back_in_7() -> None:
    async with FakeFleet(replicas=2, balancer=FirstReplica()) as fleet:
        await fleet.submit("warm", prompt=[1, 2])
        with Calls() as calls:
            await fleet.submit("a", prompt=[1, 2])
        # The link's own `send` is one call more.
        way_in = calls.between("ThreadQueue.get_batch", "EngineClient._send")
        assert len(way_in) + 1 <= 25, "\n".join(way_in)
        fleet.say("a", 1)
        with Calls() as calls:
            fleet.say("a", 2)
        assert len(calls) <= 7, "\n".join(calls)


async def test_only_with_admission_control_a_request_has_a_ticket() -> None:
    for plan in (None, AdmissionConfig()):
        async with FakeFleet(replicas=1, plan=plan) as fleet:
            await fleet.submit("a", prompt=[1, 2])
            assert (fleet.orchestrator.request_states["a"].ticket is None) is (plan is None)
