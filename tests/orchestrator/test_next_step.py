"""Which waiting run goes where: the table of cases of `next_step`."""

import gc
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Self

import pytest

from tests.admission.fakes import admission
from vllm_omni_plugin.admission import AdmissionConfig, RequestClass, RequestTerms, Ticket
from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.coordinator import ReplicaStatus
from vllm_omni_plugin.errors import NoReplicaError, RequestLostError
from vllm_omni_plugin.orchestrator import PoolMember, StageRun
from vllm_omni_plugin.orchestrator.dispatch import next_step as decisions
from vllm_omni_plugin.orchestrator.dispatch.next_step import Action, next_step
from vllm_omni_plugin.orchestrator.dispatch.waiting_runs import Choice, WaitingRuns, WaitReason
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger
from vllm_omni_plugin.orchestrator.requests.stage_run import Loss
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize

CLASSES = (RequestClass(name="first", priority_at_most=0), RequestClass(name="last"))
SIZE = EngineSize(step_tokens=16, sequences=1)
NOW = 100.0
GONE = PoolMember(7, 0), PoolMember(8, 0)
"""Two replicas that do not serve."""
HELD, CONFINED, MOVING, RETURNED, PAUSED, SUSPECT, QUEUED = WaitReason
SEND, REFUSE, EXPIRE, FAIL = Action.SEND, Action.REFUSE, Action.EXPIRE, Action.FAIL


@dataclass
class Stage:
    """A stage, as a case describes it.

    Attributes:
        members: the replicas that serve.
        apart: whether suspects are kept apart at all of them.
        room: ids of the replicas that have room.
        chosen: the replica that the policy chooses for every run; `cached`: tokens that it has cached.
        over: tenants over their share, for whom no replica has room.
    """

    members: tuple[PoolMember, ...] = field(default_factory=lambda: (PoolMember(0, 0), PoolMember(1, 0)))
    awaits_replicas: bool = False
    may_move: bool = True
    tries_paused: bool = False
    holds: bool = True
    apart: bool = False
    admits: bool = True
    room: Collection[int] = ()
    chosen: int = 0
    cached: int = 0
    broken: bool = False
    avoided: Collection[int] = ()
    over: Collection[str] = ()
    bound: Collection[str] = ()
    waiting: WaitingRuns = field(default_factory=WaitingRuns)

    def __post_init__(self) -> None:
        for member in self.members:
            member.ledger, member.status = LoadLedger(SIZE), ReplicaStatus.UP
        self.serving = self.members
        self.rules = admission(AdmissionConfig(classes=CLASSES))

    def run(
        self,
        name: str,
        tenant: str = "",
        priority: int = 0,
        timeout_s: float | None = None,
        crashed: Collection[PoolMember] = (),
        produced: int = 0,
    ) -> StageRun:
        ticket = self.rules.new_ticket(RequestTerms(tenant, timeout_s), priority, 100, NOW - 1.0)
        assert isinstance(ticket, Ticket)
        run = StageRun(name, None, 0.0, ticket=ticket, crash_losses=[Loss(member, "") for member in crashed])
        run.prompt_tokens = 100
        run.produced.extend(range(produced))
        return run

    def waits(self, name: str, reason: WaitReason, wait: float = 1e9, wants: int | None = None, **of: object) -> Self:
        run = self.run(name, **of)  # type: ignore[arg-type]
        self.waiting.add(run, reason, NOW - 1.0, wait, None if wants is None else self.choice(wants))
        return self

    def choice(self, replica_id: int) -> Choice:
        return self.members[replica_id], Decision(replica_id, "match", matched_tokens=self.cached)

    def step(self, event: StageRun | int | None = None) -> tuple[str, Action | WaitReason, int | None] | None:
        """The next step: the request, what happens to it or why it waits, and its replica."""
        freed = self.members[event] if isinstance(event, int) else event
        step = next_step(self.waiting, self, NOW, freed)
        if step is None:
            return None
        replica_id = None if step.choice is None else step.choice[0].replica_id
        return step.run.request_id, step.reason or step.action, replica_id

    def may_be_held(self, run: StageRun) -> bool:
        return self.holds

    def must_wait_apart(self, run: StageRun) -> bool:
        return self.apart

    def avoids(self, run: StageRun, member: PoolMember) -> bool:
        return member.replica_id in self.avoided

    def needs_room(self, run: StageRun) -> bool:
        return self.admits

    def has_room(self, run: StageRun, member: PoolMember, tokens: int) -> bool:
        return member.replica_id in self.room and not self.is_over_share(run)

    def replica_with_room(self, run: StageRun) -> PoolMember | None:
        return next((member for member in self.serving if self.has_room(run, member, 100)), None)

    def is_bound(self, run: StageRun) -> bool:
        return run.request_id in self.bound

    def is_over_share(self, run: StageRun) -> bool:
        assert run.ticket is not None
        return run.ticket.tenant.name in self.over

    def choose(self, run: StageRun) -> Choice | Exception:
        if not self.serving or (run.confined_to and not run.confined_to.intersection(self.serving)):
            return NoReplicaError("none serves")
        return RequestLostError("its replica is lost") if self.broken else self.choice(self.chosen)


def apart(reason: WaitReason = HELD, **of: object) -> Stage:
    """A stage without admission control, in which "a" waits."""
    members = of.pop("waits", {})
    return Stage(admits=False, **of).waits("a", reason, **members)  # type: ignore[arg-type]


def queued(**of: object) -> Stage:
    """Of the class "last" waits "b", and of the class "first" "a" of another tenant, which has come later."""
    stage = Stage(**of)  # type: ignore[arg-type]
    return stage.waits("b", QUEUED, tenant="b", priority=1).waits("a", QUEUED, tenant="a")


def busy(stage: Stage) -> Stage:
    """The first replica computes a prompt."""
    stage.members[0].ledger.prefill_tokens = 1
    return stage


def full(stage: Stage) -> Stage:
    """No engine can start a request."""
    for member in stage.members:
        member.ledger.requests = 1
    return stage


def draining(stage: Stage) -> Stage:
    stage.members[0].status = ReplicaStatus.DRAINING
    return stage


def wanting(count: int, **of: object) -> Stage:
    """So many runs wait for the second replica."""
    stage = Stage(room=(0, 1), **of)  # type: ignore[arg-type]
    for number in range(count):
        stage.waits(f"a{number}", QUEUED, wants=1)
    return stage


Expected = tuple[str, Action | WaitReason, int | None] | None
NONE: dict[str, object] = {"members": ()}


@pytest.mark.parametrize(
    ("stage", "event", "expected"),
    [
        # A run comes, without admission control.
        pytest.param(Stage(admits=False), {}, ("new", SEND, 0), id="a run comes"),
        pytest.param(Stage(members=()), {}, ("new", HELD, None), id="a run comes, and no replica serves"),
        pytest.param(Stage(members=(), holds=False), {}, ("new", REFUSE, None), id="a run comes that may not be held"),
        pytest.param(Stage(awaits_replicas=True), {}, ("new", HELD, None), id="a run comes while replicas return"),
        pytest.param(
            Stage(awaits_replicas=True, holds=False, admits=False), {}, ("new", SEND, 0), id="the same, may not be held"
        ),
        pytest.param(Stage(), {"timeout_s": 1.0}, ("new", EXPIRE, None), id="a run comes too late"),
        pytest.param(Stage(broken=True), {}, ("new", FAIL, None), id="a run comes whose replica is lost"),
        # With admission control.
        pytest.param(Stage(room=(0,)), {}, ("new", SEND, 0), id="the chosen one has room"),
        pytest.param(Stage(room=(1,)), {}, ("new", SEND, 1), id="another one has room"),
        pytest.param(Stage(room=(1,), cached=5), {}, ("new", QUEUED, 0), id="much is cached at the chosen one"),
        pytest.param(Stage(room=(1,), bound=("new",)), {}, ("new", QUEUED, 0), id="it is bound to the chosen one"),
        pytest.param(Stage(), {}, ("new", QUEUED, None), id="none has room"),
        pytest.param(queued(room=(0, 1)), {}, ("new", QUEUED, None), id="another run goes first"),
        pytest.param(queued(room=(0, 1), over=("a", "b")), {}, ("new", SEND, 0), id="those are over their share"),
        pytest.param(
            Stage(room=(0, 1)).waits("b", QUEUED, priority=1), {}, ("new", SEND, 0), id="another run goes later"
        ),
        # The reason to wait is gone.
        pytest.param(apart(), None, ("a", SEND, 0), id="held, and a replica serves"),
        pytest.param(apart(members=()), None, None, id="held, and none serves"),
        pytest.param(apart(awaits_replicas=True), None, ("a", SEND, 0), id="held, and one that is back can start it"),
        pytest.param(full(apart(awaits_replicas=True)), None, None, id="held, and left to replicas that are to come"),
        pytest.param(apart(CONFINED, waits={"crashed": GONE}), None, None, id="confined to replicas that do not serve"),
        pytest.param(
            apart(CONFINED, members=GONE, waits={"crashed": GONE}), None, ("a", SEND, 7), id="confined, and one is back"
        ),
        pytest.param(
            apart(CONFINED, waits={"crashed": GONE}).waits("b", HELD), None, ("b", SEND, 0), id="it keeps no other back"
        ),
        pytest.param(apart(MOVING), None, ("a", SEND, 0), id="its replica is lost"),
        pytest.param(apart(MOVING, members=()), None, ("a", HELD, None), id="its replica is lost, and none serves"),
        pytest.param(apart(MOVING, may_move=False), None, None, id="the head has moved too many"),
        pytest.param(
            apart(MOVING, waits={"crashed": GONE}), None, ("a", CONFINED, None), id="two engines crashed under it"
        ),
        pytest.param(
            apart(MOVING, apart=True, waits={"crashed": GONE[:1]}),
            None,
            ("a", SUSPECT, None),
            id="now a suspect",
        ),
        pytest.param(apart(MOVING, broken=True), None, ("a", FAIL, None), id="it was bound to the lost replica"),
        pytest.param(apart(RETURNED, may_move=False), None, ("a", SEND, 0), id="its replica had not got it"),
        pytest.param(apart(SUSPECT), None, ("a", SEND, 0), id="a suspect, and a replica is free of others"),
        pytest.param(apart(SUSPECT, apart=True), None, None, id="a suspect, and none is"),
        pytest.param(apart(PAUSED), None, None, id="the pause goes on"),
        pytest.param(apart(PAUSED, tries_paused=True), None, ("a", SEND, 0), id="it is time to try"),
        pytest.param(apart(PAUSED, tries_paused=True, members=()), None, None, id="there is none to try"),
        pytest.param(apart(QUEUED), None, None, id="no replica may have room"),
        pytest.param(Stage(room=(1,)).waits("a", HELD), None, ("a", SEND, 1), id="held, and needs room"),
        pytest.param(Stage().waits("a", HELD), None, ("a", QUEUED, None), id="held, and there is no room"),
        # The time to wait is over.
        pytest.param(apart(members=(), waits={"wait": 1.0}), None, ("a", REFUSE, None), id="no replica has come"),
        pytest.param(
            apart(CONFINED, waits={"wait": 1.0, "crashed": GONE}), None, ("a", REFUSE, None), id="none of its own has"
        ),
        pytest.param(
            full(apart(awaits_replicas=True, waits={"wait": 1.0})), None, ("a", SEND, 0), id="those to come have not"
        ),
        pytest.param(
            apart(SUSPECT, apart=True, waits={"wait": 1.0, "crashed": GONE[:1]}),
            None,
            ("a", SEND, 0),
            id="no replica was free of other suspects",
        ),
        # A replica may have room.
        pytest.param(queued(room=(0,)), 0, ("a", SEND, 0), id="the first one gets it"),
        pytest.param(queued(room=(1,)), 0, None, id="it has none after all"),
        pytest.param(queued(room=(0,), over="a"), 0, ("b", SEND, 0), id="one overtakes what is over its share"),
        pytest.param(queued(over="b"), 0, None, id="nothing overtakes what is within its share"),
        pytest.param(queued(room=(0,), avoided=(0,)), 0, None, id="they are kept away from there"),
        pytest.param(queued(room=(0,), chosen=1), 0, ("a", SEND, 0), id="the policy's has none, and nothing cached"),
        pytest.param(queued(room=(0,), chosen=1, cached=4), 0, ("a", SEND, 0), id="the policy's has little cached"),
        pytest.param(queued(room=(0,), chosen=1, cached=5), 0, ("a", QUEUED, 1), id="the policy's has much cached"),
        pytest.param(queued(room=(0, 1), chosen=1, cached=5), 0, ("a", SEND, 1), id="the policy's has room, too"),
        pytest.param(queued(room=(0,), broken=True), 0, ("a", FAIL, None), id="its choice fails"),
        pytest.param(wanting(1, cached=90), 1, ("a0", SEND, 1), id="one has waited for this replica"),
        pytest.param(wanting(9, cached=90), 0, None, id="less is to be computed there than is cached"),
        pytest.param(wanting(10, cached=90), 0, ("a0", SEND, 0), id="more is to be computed there than is cached"),
        pytest.param(busy(wanting(10, cached=90)), 0, None, id="more is, but this one computes something already"),
        pytest.param(wanting(10), 0, None, id="more is, but they are bound to the other one"),
        pytest.param(draining(queued(room=(0,), chosen=1)), 0, None, id="it drains"),
        pytest.param(
            draining(queued(room=(0,))).waits("pinned", QUEUED, wants=0),
            0,
            ("pinned", SEND, 0),
            id="it drains, and one can go nowhere else",
        ),
    ],
)
def test_on_an_event_each_run_goes_where_it_can_now(stage: Stage, event: object, expected: Expected) -> None:
    came = stage.run("new", **event) if isinstance(event, dict) else event
    assert stage.step(came) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("reason", WaitReason)
def test_a_run_ends_at_its_deadline_whatever_it_waits_for_unless_it_has_delivered_something(reason: WaitReason) -> None:
    stage = Stage(may_move=False, apart=True, members=())
    if reason is not RETURNED:
        assert stage.waits("begun", reason, timeout_s=1.0, produced=1).step() is None
    assert stage.waits("a", reason, timeout_s=1.0).step() == ("a", EXPIRE, None)


def test_the_order_is_that_of_the_reasons_and_in_each_that_of_arrival() -> None:
    stage = Stage(members=(PoolMember(0, 0), *GONE), tries_paused=True, room=(0,))
    for name, reason in zip("qpchsmr", (QUEUED, PAUSED, CONFINED, HELD, SUSPECT, MOVING, RETURNED), strict=True):
        for number in range(2):
            stage.waits(f"{name}{number}", reason, crashed=GONE if reason is CONFINED else ())
    order = []
    while (step := next_step(stage.waiting, stage, NOW, stage.members[0])) is not None:
        order.append(step.run.request_id)
        stage.waiting.remove(step.run)
    assert order == [f"{name}{number}" for name in "rmshcpq" for number in range(2)]


def test_no_more_are_held_than_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "MAX_HELD_REQUESTS", 2)
    stage = Stage(members=()).waits("a", HELD).waits("b", CONFINED, crashed=GONE)
    assert stage.step(stage.run("new")) == ("new", REFUSE, None)


def calls_of(work: Callable[[], object]) -> int:
    """How many Python functions are called."""
    calls = [0]

    def count(frame: object, event: str, _: object) -> None:
        calls[0] += event == "call"

    # Tools watch the collector by functions that would count, too.
    gc.disable()
    sys.setprofile(count)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls[0]


@pytest.mark.parametrize("reason", WaitReason)
def test_the_cost_of_a_step_does_not_grow_with_what_waits(reason: WaitReason) -> None:
    costs = []
    for count in (100, 1000):
        stage = Stage(may_move=False, apart=True, over={f"t{number}" for number in range(count)})
        for number in range(count if reason not in (RETURNED, HELD) else 1):
            stage.waits(f"{number}", reason, tenant=f"t{number}", crashed=GONE)
        costs.append(calls_of(lambda stage=stage: stage.step(0)))  # type: ignore[misc]
        assert costs[-1] < 200
    assert costs[0] == costs[1]
