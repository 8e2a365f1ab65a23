"""A request that no engine has got at its deadline is refused, wherever it waits."""

from tests.fakes.conditions import eventually
from tests.fakes.engine_api import FakeRequest
from tests.fakes.fleet import FakeFleet
from vllm_omni_plugin.admission import AdmissionConfig, RequestTerms, Ticket
from vllm_omni_plugin.errors import RequestRefusedError
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import SubmitRequest

from .late_fleet import late

LONG = 600.0
DUE_S = 0.01


async def submit(fleet: FakeFleet, *names: str) -> None:
    for name in names:
        await fleet.submit(name, prompt=[1], terms=RequestTerms("tenant", timeout_s=DUE_S))


async def test_on_its_way_to_the_orchestrator_of_a_busy_head() -> None:
    async with FakeFleet(replicas=1, plan=AdmissionConfig()) as fleet:
        terms = RequestTerms("tenant", timeout_s=DUE_S)
        message = SubmitRequest(FakeRequest("a", prompt=[1]), fleet.now, terms=terms)
        fleet.now = DUE_S
        await fleet.hand_over(message)
        # One whose time was over before it was submitted.
        await fleet.submit("b", prompt=[1], terms=RequestTerms("tenant", timeout_s=0.0))
        errors = dict(await fleet.read())
        assert [(errors[name].status, errors[name].reason) for name in "ab"] == [(503, "deadline")] * 2
        assert fleet.links[0].added == []
        _, other = fleet.orchestrator.admission.tenant_reports()
        assert (other.in_flight, fleet.in_flight) == (0, [0])


async def test_where_a_replica_has_room_for_it_only_after_its_deadline() -> None:
    async with late() as fleet:
        for name in "ab":
            await fleet.submit(name, prompt=[1])
        await submit(fleet, "c")
        # The head is late: outputs are read before it notices how late it is.
        fleet.now = 10 * DUE_S
        for name in "ab":
            fleet.say(name, 1, finish_reason="stop")
        assert isinstance(dict(await fleet.read())["c"], RequestRefusedError)
        assert len(fleet.links[0].added) == 2


async def test_while_no_replica_serves() -> None:
    async with FakeFleet(replicas=0, replica_wait=LONG, plan=AdmissionConfig()) as fleet:
        await submit(fleet, "a")
        assert fleet.orchestrator.metrics.held == 1
        fleet.now = DUE_S
        await eventually(lambda: not fleet.orchestrator.request_states, "the refusal")
        error = await fleet.the_error("a")
        assert isinstance(error, RequestRefusedError)
        assert (error.status, error.reason, fleet.orchestrator.metrics.held) == (503, "deadline", 0)
        fleet.join(fleet.pool.add())
        assert fleet.in_flight == [0]


async def test_not_after_the_first_output() -> None:
    async with late(replica_wait=LONG) as fleet:
        await submit(fleet, "a")
        fleet.say("a", 1)
        fleet.kill(0)
        assert fleet.orchestrator.metrics.held == 1
        fleet.now += 10 * DUE_S
        fleet.orchestrator.tick()
        assert "a" in fleet.orchestrator.request_states


async def test_no_request_is_refused_for_the_time_in_engines_while_nothing_waits() -> None:
    async with late() as fleet:
        terms = RequestTerms("tenant", timeout_s=1.0)
        # Engines take ten seconds for each, and are never behind.
        for name in "abc":
            await fleet.submit(name, prompt=[1])
            fleet.now += 10.0
            fleet.say(name, 1, finish_reason="stop")
        for name in "de":
            await fleet.submit(name, prompt=[1])
        admission = fleet.orchestrator.admission
        assert admission.expected_refusal(terms, None, fleet.now) is None
        await fleet.submit("f", prompt=[1], terms=terms)
        assert admission.expected_refusal(terms, None, fleet.now) is None
        assert list(fleet.orchestrator.request_states) == ["d", "e", "f"]
        # From here on it is known how long one waits: 0.4 s, and each may wait for 0.5 s.
        fleet.now += 0.4
        fleet.say("d", 1)
        for name in "ghi":
            await fleet.submit(name, prompt=[1], terms=terms)
        assert isinstance(dict(await fleet.read())["i"], RequestRefusedError)
        assert list(fleet.orchestrator.request_states) == ["d", "e", "f", "g", "h"]


async def test_the_time_in_engines_is_taken_off_the_deadline() -> None:
    async with late(replica_wait=LONG) as fleet:
        for name in "ab":
            await fleet.submit(name, prompt=[1])
        fleet.now += 3.0
        fleet.say("a", 1)
        fleet.say("b", 1)
        admission = fleet.orchestrator.admission
        ticket = admission.new_ticket(RequestTerms("tenant", timeout_s=10.0), 0, 1, fleet.now)
        assert isinstance(ticket, Ticket)
        assert ticket.send_by == fleet.now + 10.0 - 3.0
        admission.ended(ticket, 0, fleet.now)


async def test_a_request_whose_engine_was_lost_has_until_its_full_deadline() -> None:
    async with FakeFleet(replicas=1, replica_wait=LONG, plan=AdmissionConfig()) as fleet:
        await fleet.submit("slow", prompt=[1])
        fleet.now += 1.0
        fleet.say("slow", 1)
        await fleet.submit("a", prompt=[1], terms=RequestTerms("tenant", timeout_s=0.03))
        # An engine was to have it after 0.015 s, as they take long.
        fleet.now += 0.02
        fleet.kill(0)
        fleet.orchestrator.tick()
        assert "a" in fleet.orchestrator.request_states
        fleet.now += 0.02
        await eventually(lambda: "a" not in fleet.orchestrator.request_states, "the refusal")


async def test_clients_that_hang_up_before_the_first_token_count_for_the_time_in_engines() -> None:
    async with late(replica_wait=LONG) as fleet:
        await fleet.submit("a", prompt=[1])
        fleet.now += 5.0
        await fleet.abort("a")
        assert fleet.pool.flow.first_output_s == 5.0


async def test_requests_that_waited_or_moved_do_not_count_for_the_time_in_engines() -> None:
    async with late(replica_wait=LONG) as fleet:
        for name in "abc":
            await fleet.submit(name, prompt=[1])
        fleet.now += 1.0
        fleet.say("a", 1, finish_reason="stop")
        fleet.say("b", 1, finish_reason="stop")
        # Its replica has it since now.
        fleet.now += 1.0
        fleet.say("c", 1)
        assert fleet.pool.flow.first_output_s == 1.0
        await fleet.submit("d", prompt=[1])
        fleet.now += 60.0
        fleet.kill(0)
        fleet.join(fleet.pool.member(0))
        fleet.say("d", 1)
        assert fleet.pool.flow.first_output_s == 1.0
