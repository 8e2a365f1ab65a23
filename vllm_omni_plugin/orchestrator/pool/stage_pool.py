"""The replicas of one stage: which of them serve, their load, and the choice among them."""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from vllm_omni_plugin.admission import QueuePosition
from vllm_omni_plugin.balancing import (
    CacheChange,
    Decision,
    LoadBalancer,
    ServingReplicas,
    Task,
    UnreportedRequests,
)
from vllm_omni_plugin.balancing.interface import prompt_tokens
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.errors import NoReplicaError, ReplicaError
from vllm_omni_plugin.orchestrator.pool.affinity_bindings import AffinityBindings
from vllm_omni_plugin.orchestrator.pool.engine_refusals import EngineRefusals
from vllm_omni_plugin.orchestrator.pool.policy_guard import PolicyGuard
from vllm_omni_plugin.orchestrator.pool.pool_member import CORDON_REASONS, STALL_CORDON, PoolMember
from vllm_omni_plugin.orchestrator.pool.progress import Progress
from vllm_omni_plugin.orchestrator.pool.send_window import has_room
from vllm_omni_plugin.orchestrator.pool.stage_flow import StageFlow
from vllm_omni_plugin.orchestrator.pool.work_exchange import WorkExchange
from vllm_omni_plugin.orchestrator.requests.load_ledger import UNKNOWN_SIZE, LoadLedger, Work
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import Explanation
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun
from vllm_omni_plugin.replicas.links.engine_client import EngineClient
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize, LoadReport

BOUND = "bound"
"""The reason of a decision without the policy: the request may go to one replica only."""
WEIGHTS_REMEDY = (
    "serves after the next complete weight update; to serve with the weights of the model's files, "
    'POST {"method": "reload_weights"} to /collective_rpc'
)
"""What helps a stage whose only replicas lack the updated weights."""
APART = "apart"
"""The reason of a decision against the policy: the request avoids the policy's replica, see `Suspects`."""
_MAX_DESCRIBED = 8
"""Replicas that an error message names one by one."""


class PoolTraits(NamedTuple):
    """What a stage's replicas have in common.

    In `lockstep`, engines die with others of their group: a crash says nothing about requests there. `exchange` reports
    this head's work to other heads, if there can be any. A request `waits_for_room` at the head until a replica has it,
    and is sent at once otherwise; with `any_replica` it may go elsewhere than the policy chose first.
    """

    lockstep: bool = False
    exchange: WorkExchange | None = None
    waits_for_room: bool = False
    any_replica: bool = False


PLAIN = PoolTraits()


class StagePool:
    """The replicas of one stage and the policy that chooses among those that serve.

    Members are added and change status rarely; a choice is made for every request and looks only at serving members.

    Args:
        balancer: the policy; it runs on the orchestrator's loop and must not block.
        policy: the policy's name, that of its class by default.

    Attributes:
        members: all replicas, in order of their ids. Replaced when membership changes, so that other threads may read
            it.
        serving: the replicas that take new requests; likewise.
        departed: the `counts` of removed replicas, by their ids; likewise. A new replica with such an id goes on
            counting, so that sums of these counters never fall.
        unreported: what other heads have probably sent to this stage since their last reports.
        refusals: which engines have refused requests lately.
    """

    def __init__(
        self,
        stage_id: int,
        balancer: LoadBalancer,
        *,
        policy: str = "",
        clock: Callable[[], float] = time.monotonic,
        traits: PoolTraits = PLAIN,
    ) -> None:
        self.stage_id = stage_id
        self.lockstep, self.exchange, self.waits_for_room, self.any_replica = traits
        self._policy = PolicyGuard(balancer, policy)
        self.policy = self._policy.name
        self.follows_caches = self._policy.follows_caches
        self.wants_cache_events = self._policy.wants_cache_events
        self.flow = StageFlow(clock)
        self._clock = clock
        self._by_id: dict[int, PoolMember] = {}
        self.unreported = UnreportedRequests()
        self._bindings = AffinityBindings()
        self.refusals = EngineRefusals()
        self._promised_tokens = 0
        # Called with the id of a replica whose caches are gone: it is lost, has drained, or has cleared them.
        self.on_caches_gone: Callable[[int], None] = lambda replica_id: None
        # Called with the index of an engine that is lost, or that this head's last request has left, if it is remote.
        self.on_idle: Callable[[int], None] = lambda engine_index: None
        self.members: tuple[PoolMember, ...] = ()
        self.departed: Mapping[int, tuple[int, int, int, int]] = {}
        self.serving: ServingReplicas[PoolMember] = ServingReplicas((), self.unreported)

    def add(self, replica_id: int | None = None) -> PoolMember:
        """Add a member, not serving yet, with this id if it is free, or else the lowest free one."""
        if replica_id is None or replica_id in self._by_id:
            replica_id = next(number for number in itertools.count() if number not in self._by_id)
        member = self._by_id[replica_id] = PoolMember(replica_id, self.stage_id)
        counts = dict(self.departed)
        former = counts.pop(replica_id, (0, 0, 0, 0))
        member.assignments, member.restarts, member.stalls, member.adapter_loads = former
        self.departed = counts
        self.members = _in_order((*self.members, member))
        return member

    def remove(self, member: PoolMember) -> None:
        """Remove a lost member and free its id. Idempotent."""
        assert member.client is None, member.name
        if self._by_id.get(member.replica_id) is member:
            del self._by_id[member.replica_id]
            self.departed = {**self.departed, member.replica_id: member.counts}
            self.members = _in_order(self._by_id.values())

    def member(self, replica_id: int) -> PoolMember:
        return self._by_id[replica_id]

    def serve(
        self,
        member: PoolMember,
        client: EngineClient,
        input_addr: str,
        output_addr: str,
        size: EngineSize = UNKNOWN_SIZE,
    ) -> bool:
        """The replica takes requests over this client from now on, unless it is cordoned. Returns whether it does."""
        member.client, member.input_addr, member.output_addr = client, input_addr, output_addr
        member.ledger, member.progress = LoadLedger(size), Progress(self._clock())
        self._count(member)
        if not self._promised_tokens or (member.starts_with_head and size.max_model_len):
            self._promised_tokens = min(size.max_model_len, self._promised_tokens or size.max_model_len)
        if self.exchange is not None:
            self.set_others_work(member, self.exchange.add_member(member))
        return self._enter_service(member)

    def check_length(self, member: PoolMember, size: EngineSize) -> None:
        """Check that an engine would not die of a request that vLLM's server allows.

        With `--max-model-len -1` each engine fits the length to its own memory. The server takes the shortest length of
        the engines that it starts with, or that of the first one that joins, and keeps it.

        Raises:
            ReplicaError: it would.
        """
        tokens, promised = size.max_model_len, self._promised_tokens
        if tokens and tokens < promised and not member.starts_with_head:
            raise ReplicaError(
                f"its engine has memory for a max model length of {tokens} tokens (--max-model-len -1), and this head "
                f"has promised its clients {promised}: give the head and all nodes --max-model-len {tokens}, or this "
                "replica more memory"
            )

    def others_at(self, member: PoolMember) -> int:
        """How many requests other heads have at a replica, as far as they have reported."""
        return member.ledger.others if self.exchange is not None and self.exchange.others else 0

    def lose(self, member: PoolMember, status: ReplicaStatus) -> list[StageRun]:
        """The replica is lost, or no longer trusted. Returns the requests that were in flight there."""
        orphans = list(member.in_flight.values())
        member.in_flight.clear()
        self.unreported.in_flight -= len(orphans)
        self.flow.dropped(self._clock(), sum(not run.has_output for run in orphans))
        served, member.client = member.client is not None, None
        self._set_status(member, status)
        member.ledger = LoadLedger()
        self._count(member)
        if served:
            self._policy.notify("replica_lost", member)
            if self.exchange is not None:
                self.exchange.remove_member(member)
        self.on_caches_gone(member.replica_id)
        self.on_idle(member.engine_index)
        member.notify_if_idle()
        return orphans

    def cordon(self, member: PoolMember, reason: str) -> None:
        """Give a replica no new requests; requests in flight go on.

        Reasons add up. A reason outlives the loss of the replica, until `uncordon`.
        """
        member.cordons |= {reason}
        if member.client is not None:
            self._enter_service(member)

    def uncordon(self, member: PoolMember, reason: str) -> bool:
        """Undo `cordon` for the same reason. Returns whether the replica takes requests from now on."""
        member.cordons -= {reason}
        return member.client is not None and self._enter_service(member)

    def when_idle(self, member: PoolMember) -> "asyncio.Future[None]":
        """Done as soon as nothing is in flight on a replica; it may get more unless it is cordoned."""
        if member.idle is None or member.idle.done():
            member.idle = asyncio.get_running_loop().create_future()
        member.notify_if_idle()
        return member.idle

    def decide(
        self, task: Task, affinity_key: int | None = None, avoid: Collection[int] = (), pinned: bool = False
    ) -> tuple[PoolMember, Decision]:
        """Choose the replica for a request.

        Requests with the same `affinity_key` go to the same replica while membership stands; a `pinned` one only goes
        where the first one of its key went, even if that is cordoned. Replicas to `avoid` get none while others serve,
        whatever policy and key say.

        Raises NoReplicaError if none serves, or RequestLostError if the only possible replica was lost.
        """
        bound = self._bindings.replica_of(affinity_key) if pinned and affinity_key is not None else None
        if bound is not None:
            return bound, Decision(0, BOUND, by_policy=False)
        serving = self.serving
        if not serving:
            raise self.unavailable()
        if affinity_key is not None:
            decision = Decision(affinity_key % len(serving), BOUND, by_policy=False)
        else:
            if self.unreported.heads > 1:
                self.unreported.estimate(self._clock(), sum(serving.queue_lengths))
            decision = self._policy.decide(task, serving)
        if serving[decision.position].replica_id in avoid:
            places = [place for place, member in enumerate(serving) if member.replica_id not in avoid]
            if places:
                shortest = min(places, key=serving.queue_lengths.__getitem__)
                decision = Decision(shortest, APART, by_policy=False)
        member = serving[decision.position]
        if affinity_key is not None and not pinned:
            self._bindings.bind(affinity_key, member)
        return member, decision

    def explain(self, task: Task, queue_position: QueuePosition) -> Explanation:
        """What `decide` would answer now, without effect. Raises NoReplicaError or NoExplanationError."""
        if not self.serving:
            raise self.unavailable()
        decision = self._policy.explain(task, self.serving)
        tokens = max(0, prompt_tokens(task) - decision.matched_tokens)
        ledger = self.serving[decision.position].ledger
        may_begin = not self.waits_for_room or has_room(ledger, tokens, queue_position.is_over_share)
        loads = tuple((member.name, member.load) for member in self.serving)
        return Explanation(self.policy, decision, loads, may_begin, queue_position)

    def unavailable(self, why: str = "") -> NoReplicaError:
        """The error for a request while no replica serves; `why` it does not wait (any more). From any thread."""
        state = f"No replica of stage {self.stage_id} can serve right now ({_states(self.members)})"
        return NoReplicaError(f"{'; '.join(filter(None, (state, why)))}. Please try again later.")

    def charge(self, member: PoolMember, run: StageRun) -> None:
        member.in_flight[run.engine_request_id] = run
        member.assignments += 1
        if run.adapter and not member.ledger.adapters.has(run.adapter):
            member.adapter_loads += 1
        member.ledger.charge(run, run.charged_at)
        self.unreported.in_flight += 1
        self.flow.entered(run.charged_at)
        self._count(member)
        if self.exchange is not None:
            self.exchange.changed(member)
        self._policy.notify("assigned", run.task, member, run.decision)

    def add_first_output(self, member: PoolMember, run: StageRun, cached_tokens: int | None) -> None:
        """An attempt's first output came; `cached_tokens` is None if the engine did not report them."""
        now = self._clock()
        member.ledger.add_first_output(run, now)
        self.flow.first_output(now, run.prompt_tokens, cached_tokens, _in_engine_s(run, now))
        if self.exchange is not None:
            self.exchange.changed(member)
        self._policy.notify("began", run.task, member, cached_tokens)

    def report(self, member: PoolMember, report: LoadReport) -> None:
        """The engine reported its load; the outputs of the same message were accepted before."""
        member.progress.report(self._clock(), report.kv_usage)
        member.ledger.report(report)
        self._count(member)

    def restart_silence(self) -> None:
        """That engines have been silent until now says nothing: an operator call kept them from computing."""
        for member in self.members:
            member.progress.since = self._clock()

    def release(self, run: StageRun) -> None:
        """An attempt is no longer in flight. Idempotent."""
        member = None if run.replica_id is None else self._by_id.get(run.replica_id)
        if member is None or member.in_flight.pop(run.engine_request_id, None) is None:
            return
        self.unreported.in_flight -= 1
        now = self._clock()
        member.ledger.release(run, now)
        if not run.has_output:
            self.flow.dropped(now, in_engine_s=_in_engine_s(run, now))
        self._count(member)
        if self.exchange is not None:
            self.exchange.changed(member)
        if member.remote and not member.in_flight:
            self.on_idle(member.engine_index)
        if run.ended and not run.sent and run.decision.by_policy:
            self._policy.notify("assignment_cancelled", run.task, member, run.decision)
        run.task["answer_ids"] = run.produced[run.resumed_tokens : run.resumed_tokens + run.output_tokens]
        self._policy.notify("ended", run.task, member, now - run.charged_at, run.output_tokens)
        if member.idle is not None:
            member.notify_if_idle()

    def set_others_work(self, member: PoolMember, others: Work | None) -> None:
        """Other heads have charged this work to a replica; None: they do not report it, see `LoadLedger`."""
        member.ledger.set_others_work(others)
        self._count(member)

    def cache_changed(self, member: PoolMember, change: CacheChange) -> None:
        """The replica's engine reported a change of its cache. Ignored once the replica is lost."""
        if member.client is not None:
            self._policy.notify("cache_changed", member, change)

    def cache_cleared(self, member: PoolMember) -> None:
        if member.client is not None:
            self._policy.notify("cache_cleared", member)
            self.on_caches_gone(member.replica_id)

    def _enter_service(self, member: PoolMember) -> bool:
        self._set_status(member, ReplicaStatus.DRAINING if member.cordons else ReplicaStatus.UP)
        return not member.cordons

    def _set_status(self, member: PoolMember, status: ReplicaStatus) -> None:
        """A replica's new status; only serving ones are offered to the policy."""
        served, serves = member.status is ReplicaStatus.UP, status is ReplicaStatus.UP
        member.status = status
        if served and not serves:
            self._set_serving([m for m in self.serving if m is not member])
            member.place = None
        elif serves and not served:
            self._set_serving(_in_order((*self.serving, member)))

    def _set_serving(self, members: Sequence[PoolMember]) -> None:
        self.serving = ServingReplicas(members, self.unreported)
        for place, member in enumerate(members):
            member.place = place

    def _count(self, member: PoolMember) -> None:
        """Its ledger has changed."""
        member.queue_length = member.ledger.requests
        if member.place is not None:
            self.serving.queue_lengths[member.place] = member.queue_length


def _in_order(members: Iterable[PoolMember]) -> tuple[PoolMember, ...]:
    return tuple(sorted(members, key=lambda member: member.replica_id))


def _states(members: Collection[PoolMember]) -> str:
    if not members:
        return "it has none"
    if len(members) > _MAX_DESCRIBED:
        counts = Counter(member.state for member in members)
        return "of its replicas " + ", ".join(
            f"{count} {'get no new requests' if state == ReplicaStatus.DRAINING else f'are {state}'}"
            for state, count in sorted(counts.items())
        )
    return ", ".join(f"replica {member.replica_id} {_state(member)}" for member in members)


def _state(member: PoolMember) -> str:
    # Of a replica that is lost, the others say nothing.
    cordons = member.cordons if member.client is not None else member.cordons & {STALL_CORDON}
    why = " and ".join(CORDON_REASONS[cordon][0] for cordon in sorted(cordons))
    # Cordoned for any reason: a replica that an operator has paused does not drain.
    state = "gets no new requests" if member.state == ReplicaStatus.DRAINING else f"is {member.state}"
    return f"{state}: {why}" if why else state


def _in_engine_s(run: StageRun, now: float) -> float | None:
    """Seconds since an engine got a run; None after the first attempt, since a later one may repeat an answer."""
    is_first = run.sent and run.attempts == 1
    return now - run.first_sent_at if is_first and run.first_sent_at is not None else None
