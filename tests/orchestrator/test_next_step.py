"""Which waiting run goes where: a table of cases."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import pytest

from tests.admission.fakes import admission
from vllm_omni_plugin.admission import AdmissionConfig, RequestClass, RequestTerms, Ticket
from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.orchestrator.dispatch.next_step import Action, next_step, on_arrival
from vllm_omni_plugin.orchestrator.dispatch.waiting_runs import Choice, WaitingRuns, WaitReason
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize

CLASSES = (RequestClass(name="first", priority_at_most=0), RequestClass(name="last"))
SIZE = EngineSize(step_tokens=16, sequences=1)
NOW = 100.0


@dataclass
class Stage:
    """A stage of two replicas, as a case describes it.

    Attributes:
        room: ids of the replicas that have room.
        chooses: what the policy chooses for every run.
        over: tenants over their share, for whom no replica has room.
    """

    waiting: WaitingRuns = field(default_factory=WaitingRuns)
    members: tuple[PoolMember, ...] = (PoolMember(0, 0), PoolMember(1, 0))
    serving: Sequence[PoolMember] = ()
    awaits_replicas: bool = False
    may_move: bool = True
    tries_paused: bool = False
    apart_everywhere: bool = False
    room: Collection[int] = ()
    chooses: Choice | None = None
    confined: Collection[str] = ()
    avoided: Collection[int] = ()
    over: Collection[str] = ()
    bound: Collection[str] = ()

    def __post_init__(self) -> None:
        for member in self.members:
            member.ledger, member.status = LoadLedger(SIZE), ReplicaStatus.UP
        self.serving = self.members
        self.rules = admission(AdmissionConfig(classes=CLASSES))

    def run(self, name: str, tenant: str = "", priority: int = 0, timeout_s: float | None = None) -> StageRun:
        ticket = self.rules.new_ticket(RequestTerms(tenant, timeout_s), priority, 100, NOW - 1.0)
        assert isinstance(ticket, Ticket)
        run = StageRun(name, None, 0.0, ticket=ticket)
        run.prompt_tokens = 100
        return run

    def waits(
        self, name: str, reason: WaitReason, wait: float = 1e9, wants: Choice | None = None, **of: object
    ) -> None:
        self.waiting.add(self.run(name, **of), reason, NOW - 1.0, wait, wants)  # type: ignore[arg-type]

    def cached(self, replica_id: int, tokens: int) -> Choice:
        """The policy's choice of a replica that has so many tokens of the prompt cached."""
        return self.members[replica_id], Decision(replica_id, "match", matched_tokens=tokens)

    def step(self, freed: int | None = None) -> tuple[str, Action, int | None] | None:
        """The next step: the request, what happens to it, and to which replica it goes."""
        step = next_step(self.waiting, self, NOW, None if freed is None else self.members[freed])
        if step is None:
            return None
        return step.run.request_id, step.action, None if step.choice is None else step.choice[0].replica_id

    def allowed(self, run: StageRun) -> Collection[PoolMember]:
        return () if run.request_id in self.confined else self.serving

    def must_wait_apart(self, run: StageRun) -> bool:
        return self.apart_everywhere

    def avoids(self, run: StageRun, member: PoolMember) -> bool:
        return member.replica_id in self.avoided

    def has_room(self, run: StageRun, member: PoolMember, tokens: int) -> bool:
        return member.replica_id in self.room and not self.is_over_share(run)

    def replica_with_room(self, run: StageRun) -> PoolMember | None:
        return next((member for member in self.serving if self.has_room(run, member, 100)), None)

    def is_bound(self, run: StageRun) -> bool:
        return run.request_id in self.bound

    def is_over_share(self, run: StageRun) -> bool:
        assert run.ticket is not None
        return run.ticket.tenant.name in self.over

    def choose(self, run: StageRun) -> Choice:
        assert self.chooses is not None
        return self.chooses


HELD, MOVING, RETURNED = WaitReason.NO_REPLICA, WaitReason.MOVING, WaitReason.RETURNED
PAUSED, SUSPECT, QUEUED = WaitReason.PAUSED, WaitReason.SUSPECT, WaitReason.QUEUED
ASSIGN, SEND, WAIT_FOR = Action.ASSIGN, Action.SEND, Action.WAIT_FOR


@pytest.mark.parametrize(
    ("reason", "stage", "expected"),
    [
        pytest.param(HELD, Stage(), ASSIGN, id="held, and a replica serves"),
        pytest.param(HELD, Stage(members=()), None, id="held, and none serves"),
        pytest.param(HELD, Stage(confined="a"), None, id="held, and only replicas serve to which it may not go"),
        pytest.param(HELD, Stage(awaits_replicas=True), ASSIGN, id="held, and one that is back can start it"),
        pytest.param(MOVING, Stage(), ASSIGN, id="its replica is lost"),
        pytest.param(MOVING, Stage(members=()), ASSIGN, id="its replica is lost, and it is to be held"),
        pytest.param(MOVING, Stage(may_move=False), None, id="the head has moved too many"),
        pytest.param(RETURNED, Stage(may_move=False, members=()), ASSIGN, id="its replica had not got it"),
        pytest.param(SUSPECT, Stage(), ASSIGN, id="a suspect, and a replica is free of others"),
        pytest.param(SUSPECT, Stage(apart_everywhere=True), None, id="a suspect, and none is"),
        pytest.param(PAUSED, Stage(), None, id="the pause goes on"),
        pytest.param(PAUSED, Stage(tries_paused=True), ASSIGN, id="it is time to try"),
        pytest.param(PAUSED, Stage(tries_paused=True, members=()), None, id="there is none to try"),
        pytest.param(QUEUED, Stage(), None, id="no replica may have room"),
    ],
)
def test_what_needs_no_room_goes_as_soon_as_its_reason_is_gone(
    reason: WaitReason, stage: Stage, expected: Action | None
) -> None:
    stage.waits("a", reason)
    assert stage.step() == (expected and ("a", expected, None))


def test_held_runs_are_left_to_the_replicas_that_are_to_come_if_none_can_start_them() -> None:
    stage = Stage(awaits_replicas=True)
    stage.waits("a", HELD)
    for member in stage.members:
        member.ledger.set_peer_work(None)
        member.ledger.requests = 1
    assert stage.step() is None


def test_a_run_that_may_go_nowhere_keeps_no_other_back() -> None:
    stage = Stage(confined="a")
    for name in "ab":
        stage.waits(name, HELD)
    assert stage.step() == ("b", ASSIGN, None)


@pytest.mark.parametrize(
    ("reason", "stage", "expected"),
    [
        pytest.param(HELD, Stage(members=()), Action.REFUSE, id="no replica has come"),
        pytest.param(HELD, Stage(awaits_replicas=True), ASSIGN, id="one was left to replicas that have not come"),
        pytest.param(SUSPECT, Stage(apart_everywhere=True), ASSIGN, id="no replica was free of other suspects"),
    ],
)
def test_what_has_waited_long_enough_ends_or_goes_on(reason: WaitReason, stage: Stage, expected: Action) -> None:
    stage.waits("a", reason, wait=1.0)
    assert stage.step() == ("a", expected, None)


@pytest.mark.parametrize("reason", WaitReason)
def test_a_run_ends_at_its_deadline_whatever_it_waits_for_unless_it_has_delivered_something(reason: WaitReason) -> None:
    stage = Stage(may_move=False, apart_everywhere=True, members=())
    if reason is not RETURNED:
        begun = stage.run("begun", timeout_s=1.0)
        begun.produced.append(1)
        stage.waiting.add(begun, reason, NOW - 1.0)
        assert stage.step() is None
    stage.waits("a", reason, timeout_s=1.0)
    assert stage.step() == ("a", Action.EXPIRE, None)


def test_the_order_is_that_of_the_reasons_and_in_each_that_of_arrival() -> None:
    stage = Stage(tries_paused=True, room=(0,))
    stage.chooses = stage.cached(0, 0)
    for name, reason in zip("qpshmr", (QUEUED, PAUSED, HELD, SUSPECT, MOVING, RETURNED), strict=True):
        for number in range(2):
            stage.waits(f"{name}{number}", reason)
    order = []
    while (step := next_step(stage.waiting, stage, NOW, stage.members[0])) is not None:
        order.append(step.run.request_id)
        stage.waiting.remove(step.run)
    assert order == ["r0", "r1", "m0", "m1", "h0", "h1", "s0", "s1", "p0", "p1", "q0", "q1"]


def queued(**of: object) -> Stage:
    """Of the class "last" waits "b", and of the class "first" "a" of another tenant, which has come later."""
    stage = Stage(**of)  # type: ignore[arg-type]
    stage.chooses = stage.cached(0, 0)
    stage.waits("b", QUEUED, tenant="b", priority=1)
    stage.waits("a", QUEUED, tenant="a")
    return stage


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        pytest.param(queued(room=(0,)), ("a", SEND, 0), id="the first one"),
        pytest.param(queued(room=(1,)), None, id="its replica has no room after all"),
        pytest.param(queued(room=(0,), over="a"), ("b", SEND, 0), id="the next one overtakes what is over its share"),
        pytest.param(queued(over="b"), None, id="nothing overtakes what is within its share"),
        pytest.param(queued(room=(0,), avoided=(0,)), None, id="it is kept away from there"),
    ],
)
def test_a_replica_with_room_gets_what_waits_in_order(
    stage: Stage, expected: tuple[str, Action, int | None] | None
) -> None:
    assert stage.step(freed=0) == expected


@pytest.mark.parametrize(
    ("chosen", "cached", "room", "expected"),
    [
        pytest.param(1, 0, (0,), (SEND, 0), id="the policy's replica has no room, and nothing is cached there"),
        pytest.param(1, 4, (0,), (SEND, 0), id="little is cached there"),
        pytest.param(1, 5, (0,), (WAIT_FOR, 1), id="much is cached there"),
        pytest.param(1, 5, (0, 1), (SEND, 1), id="the policy's replica has room, too"),
    ],
)
def test_a_run_goes_where_there_is_room_unless_much_is_cached_elsewhere(
    chosen: int, cached: int, room: tuple[int, ...], expected: tuple[Action, int]
) -> None:
    stage = Stage(room=room)
    stage.chooses = stage.cached(chosen, cached)
    stage.waits("a", QUEUED)
    assert stage.step(freed=0) == ("a", *expected)


@pytest.mark.parametrize(
    ("freed", "cached", "waiting", "computes", "expected"),
    [
        pytest.param(1, 90, 1, 0, ("a0", SEND, 1), id="it has waited for this replica"),
        pytest.param(0, 90, 9, 0, None, id="less is to be computed there than is cached"),
        pytest.param(0, 90, 10, 0, ("a0", SEND, 0), id="more is to be computed there than is cached"),
        pytest.param(0, 90, 10, 1, None, id="this one computes something already"),
        pytest.param(0, 0, 10, 0, None, id="it is bound to the other one"),
    ],
)
def test_a_run_that_waits_for_a_replica_goes_elsewhere_only_where_that_costs_nobody_anything(
    freed: int, cached: int, waiting: int, computes: int, expected: tuple[str, Action, int | None] | None
) -> None:
    stage = Stage(room=(0, 1))
    stage.members[0].ledger.prefill_tokens = computes
    for number in range(waiting):
        stage.waits(f"a{number}", QUEUED, wants=stage.cached(1, cached))
    assert stage.step(freed) == expected


@pytest.mark.parametrize(
    ("stage", "cached", "waits", "expected"),
    [
        pytest.param(Stage(room=(0,)), 0, "", (SEND, 0), id="the chosen one has room"),
        pytest.param(Stage(room=(1,)), 0, "", (SEND, 1), id="another one has room"),
        pytest.param(Stage(room=(1,)), 5, "", (WAIT_FOR, 0), id="much is cached at the chosen one"),
        pytest.param(Stage(room=(1,), bound="a"), 0, "", (WAIT_FOR, 0), id="it is bound to the chosen one"),
        pytest.param(Stage(), 0, "", (WAIT_FOR, None), id="none has room"),
        pytest.param(Stage(room=(0, 1)), 0, "before", (WAIT_FOR, None), id="another run goes first"),
        pytest.param(Stage(room=(0, 1), over=("before",)), 0, "before", (SEND, 0), id="that one is over its share"),
        pytest.param(Stage(room=(0, 1)), 0, "behind", (SEND, 0), id="another run goes later"),
    ],
)
def test_a_run_that_comes_is_sent_where_there_is_room_for_it(
    stage: Stage, cached: int, waits: str, expected: tuple[Action, int | None]
) -> None:
    if waits == "before":
        stage.waits("before", QUEUED, tenant="before")
    run = stage.run("a")
    if waits == "behind":
        stage.waits("behind", QUEUED, priority=1)
    _, action, choice = on_arrival(stage.waiting, stage, run, stage.cached(0, cached))
    assert (action, choice and choice[0].replica_id) == expected


def test_a_replica_that_drains_gets_only_what_can_go_nowhere_else() -> None:
    stage = Stage(room=(0,))
    stage.chooses = stage.cached(1, 0)
    stage.members[0].status = ReplicaStatus.DRAINING
    stage.waits("a", QUEUED)
    assert stage.step(freed=0) is None
    stage.waits("pinned", QUEUED, wants=stage.cached(0, 0))
    assert stage.step(freed=0) == ("pinned", SEND, 0)
