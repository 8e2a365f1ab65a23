"""Each workload has the shape it is named after."""

from itertools import pairwise

import pytest
from simulator.profiles import accelerator
from simulator.requests import Session
from simulator.workload import Scale
from simulator.workloads import WORKLOADS

SCALE = Scale(replicas=8, requests=600, settings=accelerator(), seed=1)


def sessions_of(name: str) -> list[Session]:
    return list(WORKLOADS[name](SCALE).sessions)


@pytest.mark.parametrize("name", WORKLOADS)
def test_a_workload_is_in_order_and_has_the_size_asked_for_within_the_clients_limits(name: str) -> None:
    sessions = sessions_of(name)
    starts = [session.starts for session in sessions]
    assert starts == sorted(starts)
    requests = [request for session in sessions for request in session.turns]
    assert len(requests) == pytest.approx(SCALE.requests, rel=0.15)
    assert len({request.number for request in requests}) == len(requests)
    assert all(1 <= request.output_tokens <= request.max_tokens for request in requests)
    assert all(request.prompt_tokens + request.max_tokens < SCALE.settings.max_model_len for request in requests)


def test_steady_arrives_at_the_rate_that_keeps_the_fleet_busy() -> None:
    starts = [session.starts for session in sessions_of("steady")]
    assert len(starts) / starts[-1] == pytest.approx(SCALE.rate(0.75, 512, 128), rel=0.1)


def test_heavy_tailed_lengths_differ_by_orders_of_magnitude() -> None:
    prompts = sorted(session.turns[0].prompt_tokens for session in sessions_of("heavy-tailed"))
    assert prompts[-1] > 100 * prompts[len(prompts) // 20]


def test_every_prompt_starts_with_the_shared_system_prompt() -> None:
    turns = [session.turns[0] for session in sessions_of("shared-system-prompt")]
    assert len({bytes(turn.tokens[:2000]) for turn in turns}) == 1
    assert len({bytes(turn.tokens[:2100]) for turn in turns}) == len(turns)


def test_turns_start_with_the_whole_session_before() -> None:
    sessions = sessions_of("multi-turn")
    assert max(len(session.turns) for session in sessions) > 10
    for session in sessions:
        assert len(session.pauses) == len(session.turns)
        for before, after in pairwise(session.turns):
            assert after.tokens[: len(before.tokens)] == before.tokens
            assert after.session == before.session


def test_150_tenants_have_a_context_each() -> None:
    turns = [session.turns[0] for session in sessions_of("tenants")]
    contexts = {(turn.session, bytes(turn.tokens[:6000])) for turn in turns}
    assert len(contexts) == len({turn.session for turn in turns}) > 140
    assert min(turn.prompt_tokens for turn in turns) > 6000


def test_churn_has_replicas_die_and_leave_one_at_a_time() -> None:
    incidents = WORKLOADS["churn"](SCALE).incidents
    assert {incident.kind for incident in incidents} == {"die", "leave"}
    assert all(before.until <= after.at for before, after in pairwise(incidents))
