"""The head of a simulated fleet: asks the policy, calls its hooks, and keeps accounts."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Protocol, cast, runtime_checkable

from simulator.engine import Outcome
from simulator.replica import Clock, SimReplica
from simulator.requests import Job, Request
from vllm_omni_plugin.admission import HeadroomSize
from vllm_omni_plugin.balancing import CacheChange, Decision, ServingReplicas, Task, UnreportedRequests
from vllm_omni_plugin.orchestrator.dispatch.head_queue import HEADROOM_REASON
from vllm_omni_plugin.orchestrator.dispatch.headroom import Headroom
from vllm_omni_plugin.orchestrator.dispatch.unsent_queue import RECALLS, UnsentQueue, UnsentRun
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.pool.send_window import SEND_AT_ONCE, SendWindow, short_prefill_tokens
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun
from vllm_omni_plugin.vllm_api.requests.engine_types import LoadReport


class Policy(Protocol):
    """A `LoadBalancer` that may read the internals of a replica. It may have the methods of `PolicyHooks`."""

    def select(self, task: Task, replicas: Sequence[SimReplica]) -> int:
        """The index of the chosen replica."""


@runtime_checkable
class Polling(Protocol):
    """A policy that polls the fleet every `tick_s` seconds instead of getting events."""

    tick_s: float

    def tick(self, replicas: Sequence[SimReplica]) -> None:
        """Poll the replicas."""


class Head:
    """Does for simulated replicas what the orchestrator does for real ones.

    An error of the policy is not caught: it ends the simulation.

    Args:
        send: submits a job to the engine of a replica.

    Attributes:
        unsent: requests that wait here for their replicas.
        reserve_bubbles: times an engine had started everything it had, while a request waited here for it.
        recalls: requests that waited for a replica and went to another one.
    """

    def __init__(self, policy: Policy, clock: Clock, send: Callable[[SimReplica, Job], None]) -> None:
        self.unsent = UnsentQueue(self._run_is_over_share)
        self.reserve_bubbles = self.recalls = 0
        binds_late = getattr(policy, "binds_late", False)
        self._send_window = SendWindow(limited=True, recalls=True) if binds_late else SEND_AT_ONCE
        self._headroom = Headroom(self, self._send_window, self._run_is_over_share, self._headroom_size, clock)
        self._send = send
        self._jobs: dict[StageRun, Job] = {}
        self._runs: dict[Request, StageRun] = {}
        self.unreported = UnreportedRequests()
        self.serving: ServingReplicas[SimReplica] = ServingReplicas((), self.unreported)
        self.engines_report = bool(getattr(policy, "wants_cache_events", False))
        self._policy = policy
        self._clock = clock
        self._decide: Callable[[Task, Sequence[SimReplica]], Decision] | None = getattr(policy, "decide", None)

    def serve(self, replica: SimReplica) -> None:
        if replica in self.serving:
            return
        replica.serves(True)
        self.serving = ServingReplicas(
            sorted((*self.serving, replica), key=lambda member: member.replica_id), self.unreported
        )
        if self.engines_report:
            replica.engine.cache.record_changes()
            self._tell("cache_changed", replica, CacheChange(restart=True))

    def cordon(self, replica: SimReplica) -> None:
        """Send no new requests to the replica."""
        if replica in self.serving:
            replica.serves(False)
            self.serving = ServingReplicas(
                [member for member in self.serving if member is not replica], self.unreported
            )
            if self.serving:
                for run in self.unsent.runs_of(_member(replica)):
                    self._recall(run)

    def lose(self, replica: SimReplica) -> list[Job]:
        """The engine of the replica is lost. Returns the jobs that ran there."""
        self.cordon(replica)
        self._tell("replica_lost", replica)
        for run in replica.in_flight.values():
            self.unsent.remove(run)
            if (job := self._jobs.pop(run, None)) is not None:
                del self._runs[job.request]
        return list(replica.in_flight)

    def is_idle(self, replica: SimReplica) -> bool:
        return not replica.in_flight

    def submit(self, request: Request) -> None:
        """Choose a serving replica, of which there must be one, and charge it. Send the request once it has room."""
        task = request.task()
        self._place(request, task, self._prefer_headroom(request, self._choose(task)))

    def _choose(self, task: Task) -> Decision:
        if self._decide is not None:
            return self._decide(task, self.serving)
        return Decision(self._policy.select(task, self.serving), "")

    def _prefer_headroom(self, request: Request, decision: Decision) -> Decision:
        """See `HeadQueue.prefer_headroom`."""
        chosen = self.serving[decision.position]
        few = short_prefill_tokens(chosen.ledger)
        if not self.unsent.has_over_share or decision.matched_tokens > few or self._is_over_share(request):
            return decision

        def may_start(replica: SimReplica) -> bool:
            return self._send_window.has_room(replica.ledger, request.prompt_tokens)

        best = self._headroom.least_loaded(chosen, may_start)
        return decision if best is chosen else Decision(self.serving.index(best), HEADROOM_REASON)

    def _place(self, request: Request, task: Task, decision: Decision) -> None:
        replica = self.serving[decision.position]
        job = request.job(replica.engine.settings.block_size)
        job.cached_tokens = decision.matched_tokens
        run = StageRun(task["request_id"], SimpleNamespace(**task), self._clock.now)
        run.assign(replica.replica_id, task["request_id"], task, decision, self._clock.now)
        replica.charge(job, run)
        self.serving.update(replica, replica.ledger)
        self._tell("dispatched", task, replica, decision)
        member = _member(replica)
        if self._headroom.has_room(run, replica, run.prefill_tokens) and not self.unsent.is_behind(
            run, member, self._key(request)
        ):
            replica.ledger.mark_sent(run)
            self._send(replica, job)
        else:
            self._jobs[run] = job
            self._runs[request] = run
            self.unsent.add(run, UnsentRun(member, job, self._key(request)))

    def fill(self, replica: SimReplica) -> None:
        """Send what waits for a replica or, if nothing does, what waits for others. See `Dispatcher`."""
        if not len(self.unsent):
            return
        member = _member(replica)
        first = self.unsent.first_of(member)
        next_is_in_share = first is not None and not self._run_is_over_share(first)
        idle = not replica.ledger.pending
        for run, waiting in self.unsent.take_sendable(
            member, lambda run: self._headroom.has_room(run, replica, run.prefill_tokens)
        ):
            self.reserve_bubbles += idle and not self._run_is_over_share(run)
            idle = False
            del self._runs[self._jobs.pop(run).request]
            replica.ledger.mark_sent(run)
            self._send(replica, waiting.request)
        if next_is_in_share or replica not in self.serving:
            return
        for run in self.unsent.next_recalls(self._clock.now, RECALLS, over_share=self.unsent.first_of(member) is None):
            if not self._headroom.has_room(run, replica, run.prefill_tokens):
                return
            self._ask_again(run, replica)

    def _ask_again(self, run: StageRun, replica: SimReplica) -> None:
        charged_to = next(member for member in self.serving if member.replica_id == run.replica_id)
        charged_to.ledger.release(run, self._clock.now)
        self.serving.update(charged_to, charged_to.ledger)
        decision = self._choose(run.task)
        charged_to.ledger.charge(run, self._clock.now)
        self.serving.update(charged_to, charged_to.ledger)
        overtakes = self.unsent.has_over_share and not self._run_is_over_share(run)
        computes_more = run.prompt_tokens - decision.matched_tokens > run.prefill_tokens
        if computes_more and self.serving[decision.position].ledger.prefill_tokens and not overtakes:
            return
        may_begin = self._may_begin(run, decision)
        if not may_begin and overtakes and decision.matched_tokens <= short_prefill_tokens(replica.ledger):
            decision = Decision(self.serving.index(replica), HEADROOM_REASON)
            may_begin = self._may_begin(run, decision)
        if may_begin and self.serving[decision.position] is not charged_to:
            self.recalls += 1
            self._recall(run, decision)

    def _may_begin(self, run: StageRun, decision: Decision) -> bool:
        replica, tokens = self.serving[decision.position], run.prompt_tokens - decision.matched_tokens
        key = self._key(self._jobs[run].request)
        return self._headroom.has_room(run, replica, tokens) and not self.unsent.is_behind(run, _member(replica), key)

    def _run_is_over_share(self, run: StageRun) -> bool:
        return self._is_over_share(run.request.engine_inputs)

    def _is_over_share(self, request: Request) -> bool:
        return False

    def _headroom_size(self) -> HeadroomSize:
        return HeadroomSize.NORMAL

    def _key(self, request: Request) -> Any:
        """The request's place in the order of waiting requests."""
        return request.arrived

    def _waiting_job(self, request: Request) -> Job | None:
        """The job of a waiting request; None if it does not wait."""
        run = self._runs.get(request)
        return None if run is None else self._jobs[run]

    def _withdraw(self, job: Job) -> None:
        """Take a job out of the queue, and release the replica that was charged with it."""
        run = self._runs.pop(job.request)
        del self._jobs[run]
        waiting = self.unsent.remove(run)
        assert waiting is not None
        replica = cast(SimReplica, waiting.member)
        replica.release(job)
        self.serving.update(replica, replica.ledger)
        self._tell("ended", run.task, replica, 0.0, 0)

    def _recall(self, run: StageRun, decision: Decision | None = None) -> None:
        job = self._jobs[run]
        self._withdraw(job)
        self._place(job.request, run.task, decision or self._choose(run.task))

    def receive(
        self, replica: SimReplica, outcome: Outcome, report: LoadReport | None, change: CacheChange | None
    ) -> list[Request]:
        """Handle a message of an engine. Returns the requests that have ended."""
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
            self._tell("ended", run.task, replica, now - run.charged_at, job.output_tokens)
        replica.settle(report)
        if (outcome.began or outcome.ended) and replica in self.serving:
            self.serving.update(replica, replica.ledger)
        return [job.request for job in outcome.ended]

    def _tell(self, hook: str, *args: Any) -> None:
        method = getattr(self._policy, hook, None)
        if method is not None:
            method(*args)


def _member(replica: SimReplica) -> PoolMember:
    """Typed as `UnsentQueue` needs it; it uses no attribute that `SimReplica` does not have."""
    return cast(PoolMember, replica)
