"""The head of a simulated fleet: asks the policy, tells it what happens, and counts."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

from simulator.engine import Outcome
from simulator.replica import Clock, SimReplica
from simulator.requests import Job, Request
from vllm_omni_plugin.balancing import CacheChange, Decision, ServingReplicas, Task, UnreportedRequests
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun
from vllm_omni_plugin.vllm_api.requests.facts import LoadReport


class Policy(Protocol):
    """A `LoadBalancer` that may look behind the view of a replica. May have the methods of `Observer`."""

    def select(self, task: Task, replicas: Sequence[SimReplica]) -> int:
        """The place of the chosen replica."""


@runtime_checkable
class Polling(Protocol):
    """A policy that looks at the fleet now and then instead of hearing of it.

    Attributes:
        tick_s: seconds between looks.
    """

    tick_s: float

    def tick(self, replicas: Sequence[SimReplica]) -> None:
        """Look."""


class Head:
    """Does for simulated replicas what the orchestrator does for real ones.

    A fault of the policy is not caught here: it shall end the simulation.

    Args:
        policy: which replica runs a request.
        clock: the simulation's.
    """

    def __init__(self, policy: Policy, clock: Clock) -> None:
        self.unreported = UnreportedRequests()
        self.serving: ServingReplicas[SimReplica] = ServingReplicas((), self.unreported)
        self.engines_report = bool(getattr(policy, "wants_cache_events", False))
        self._policy = policy
        self._clock = clock
        self._decide: Callable[[Task, Sequence[SimReplica]], Decision] | None = getattr(policy, "decide", None)

    def serve(self, replica: SimReplica) -> None:
        """The replica takes requests from now on."""
        if replica in self.serving:
            return
        replica.serves(True)
        self.serving = ServingReplicas(
            sorted((*self.serving, replica), key=lambda member: member.replica_id), self.unreported
        )
        if self.engines_report:
            replica.engine.cache.record_changes()
            self._tell("cache_changed", replica, CacheChange(restart=True))

    def hold_back(self, replica: SimReplica) -> None:
        """It gets no new requests."""
        if replica in self.serving:
            replica.serves(False)
            self.serving = ServingReplicas(
                [member for member in self.serving if member is not replica], self.unreported
            )

    def lose(self, replica: SimReplica) -> list[Job]:
        """Its engine is gone; returns what ran there."""
        self.hold_back(replica)
        self._tell("forgotten", replica)
        return list(replica.in_flight)

    def dispatch(self, request: Request) -> tuple[SimReplica, Job]:
        """Choose a replica that serves, of which there must be one, and charge it."""
        task = request.task()
        if self._decide is not None:
            decision = self._decide(task, self.serving)
        else:
            decision = Decision(self._policy.select(task, self.serving), "")
        replica = self.serving[decision.position]
        job = request.job(replica.engine.settings.block_size)
        job.cached_tokens = decision.matched_tokens
        run = StageRun(task["request_id"], SimpleNamespace(**task), self._clock.now)
        run.dispatch(replica.replica_id, task["request_id"], task, decision, self._clock.now)
        replica.charge(job, run)
        self.serving.changed(replica)
        self._tell("dispatched", task, replica, decision)
        return replica, job

    def receive(
        self, replica: SimReplica, outcome: Outcome, report: LoadReport | None, change: CacheChange | None
    ) -> list[Request]:
        """A message of an engine has arrived; returns the requests it ends."""
        now = self._clock.now
        if change is not None:
            self._tell("cache_changed", replica, change)
        for job in outcome.began:
            run, request = replica.begin(job), job.request
            request.cached_tokens = job.cached_tokens
            if request.first_token is None:
                request.first_token = now
            self._tell("began", run.task, replica, job.cached_tokens)
        for job in outcome.ended:
            run = replica.release(job)
            job.request.finished = now
            run.task["answer_ids"] = job.answer
            self._tell("ended", run.task, replica, now - run.attempt_at, job.output_tokens)
        replica.settle(report)
        if (outcome.began or outcome.ended) and replica in self.serving:
            self.serving.changed(replica)
        return [job.request for job in outcome.ended]

    def _tell(self, hook: str, *args: Any) -> None:
        method = getattr(self._policy, hook, None)
        if method is not None:
            method(*args)
