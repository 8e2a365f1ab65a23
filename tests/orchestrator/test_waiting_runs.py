"""Random histories of waiting runs, beside a list that is sorted anew each time."""

from math import inf

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tests.admission.fakes import admission
from vllm_omni_plugin.admission import AdmissionConfig, RequestClass, RequestTerms, Ticket
from vllm_omni_plugin.balancing import Decision
from vllm_omni_plugin.orchestrator import PoolMember, StageRun
from vllm_omni_plugin.orchestrator.dispatch.waiting_runs import WaitingRuns, WaitReason

CLASSES = (RequestClass(name="first", priority_at_most=0), RequestClass(name="last"))


class WaitingHistories(RuleBasedStateMachine):
    """Runs come with tickets of a real admission, wait for one reason after the other, and leave."""

    def __init__(self) -> None:
        super().__init__()
        self.rules = admission(AdmissionConfig(classes=CLASSES))
        self.members = [PoolMember(0, 0), PoolMember(1, 0)]
        self.waiting = WaitingRuns()
        # The model: reason, the replica that it waits for, cached tokens, and the end of its wait.
        self.runs: dict[StageRun, tuple[WaitReason, int | None, int, float]] = {}

    @rule(
        tenant=st.sampled_from("ab"),
        priority=st.integers(0, 1),
        timeout=st.sampled_from([None, 3.0]),
        reason=st.sampled_from(WaitReason),
        wants=st.sampled_from([None, 0, 1]),
        cached=st.integers(0, 50),
        wait=st.sampled_from([1.0, 5.0, inf]),
    )
    def comes(
        self,
        tenant: str,
        priority: int,
        timeout: float | None,
        reason: WaitReason,
        wants: int | None,
        cached: int,
        wait: float,
    ) -> None:
        ticket = self.rules.new_ticket(RequestTerms(tenant, timeout), priority, 100, 0.0)
        assert isinstance(ticket, Ticket)
        run = StageRun(f"r{ticket.number}", None, 0.0, ticket=ticket)
        run.prompt_tokens = 100
        self.waits(run, reason, wants, cached, wait)

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), reason=st.sampled_from(WaitReason), wants=st.sampled_from([None, 0, 1]))
    def waits_for_another_reason(self, data: st.DataObject, reason: WaitReason, wants: int | None) -> None:
        self.waits(data.draw(st.sampled_from([*self.runs])), reason, wants, 0, inf)

    def waits(self, run: StageRun, reason: WaitReason, wants: int | None, cached: int, wait: float) -> None:
        wants = wants if reason is WaitReason.QUEUED else None
        choice = None if wants is None else (self.members[wants], Decision(wants, "match", matched_tokens=cached))
        ends_at = self.waiting.add(run, reason, 0.0, wait, choice)
        assert run.ticket is not None
        assert ends_at == min(wait, run.ticket.send_by)
        self.runs.pop(run, None)
        self.runs[run] = (reason, wants, cached, ends_at)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def leaves(self, data: st.DataObject) -> None:
        run = data.draw(st.sampled_from([*self.runs]))
        reason, wants, *_ = self.runs.pop(run)
        place = self.waiting.remove(run)
        assert place is not None
        assert (place.reason, place.wants and place.wants[0].replica_id) == (reason, wants)
        assert self.waiting.remove(run) is None

    @invariant()
    def each_reason_has_its_runs_in_the_order_in_which_they_came(self) -> None:
        assert len(self.waiting) == len(self.runs)
        for reason in WaitReason:
            expected = [run for run, place in self.runs.items() if place[0] is reason]
            assert [*self.waiting.runs(reason)] == expected
            assert self.waiting.first(reason) is next(iter(expected), None)

    @invariant()
    def queued_runs_are_in_the_order_of_their_tickets(self) -> None:
        for member in self.members:
            queued = sorted(self.queued({None, member.replica_id}), key=self.ticket)
            firsts = {}
            for run in queued:
                wants = self.runs[run][1]
                ticket = self.ticket(run)
                firsts.setdefault((wants, ticket.tenant.name, ticket.class_name), run)
            assert [run for _, run in self.waiting.queued_for(member)] == sorted(firsts.values(), key=self.ticket)
            own = sorted(self.queued({member.replica_id}), key=self.ticket)
            assert self.waiting.waiting_for(member) == own
            assert self.waiting.tokens_for(member) == sum(100 - self.runs[run][2] for run in own)
            others = self.queued({1 - member.replica_id})
            first = min(others, key=self.ticket, default=None)
            assert next((run for _, run in self.waiting.queued_for(member, others=True)), None) is first

    @invariant()
    def the_first_end_is_the_first(self) -> None:
        ends = [place[3] for place in self.runs.values() if place[3] < inf]
        first = self.waiting.first_end()
        assert (None if first is None else first[0]) == min(ends, default=None)

    def queued(self, wants: set[int | None]) -> list[StageRun]:
        return [run for run, place in self.runs.items() if place[0] is WaitReason.QUEUED and place[1] in wants]

    def ticket(self, run: StageRun) -> Ticket:
        assert run.ticket is not None
        return run.ticket


TestWaitingHistories = WaitingHistories.TestCase
