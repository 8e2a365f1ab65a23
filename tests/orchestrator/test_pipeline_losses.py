"""Replicas of a pipeline's stages are lost: requests go on as if nothing had happened, or end with one clear error."""

from collections.abc import Sequence

import pytest

from tests.fakes.pipeline_fleet import FakePipelineFleet
from tests.fakes.pipelines import CHAIN, DIAMOND, SPEECH
from vllm_omni_plugin.errors import NoReplicaError, RequestLostError
from vllm_omni_plugin.pipeline import Stage

KINDS = [
    pytest.param(CHAIN, ["text"], id="chain"),
    pytest.param(DIAMOND, ["text"], id="diamond"),
    pytest.param(SPEECH, ["text", "audio"], id="speech"),
]


async def advance(fleet: FakePipelineFleet) -> bool:
    """One engine with work outputs one token; the last stage first. False if all have ended."""
    at_work = sorted(fleet.at_work(list(fleet.states)), key=lambda work: -work[1])
    if at_work:
        await fleet.step(*at_work[0])
    return bool(at_work)


async def run(
    stages: Sequence[Stage], modalities: Sequence[str], lose: dict[int, int]
) -> tuple[dict[str, list[int]], int]:
    """Run a request; before the steps that are keys, the replica that works on it in a stage is lost.

    Returns:
        What the client got, and the number of steps.
    """
    outputs = [stage.name for stage in stages if stage.is_vllm]
    async with FakePipelineFleet(stages, replicas=2, migration_limit=9) as fleet:
        await fleet.submit("r", *modalities, outputs=outputs, prompt=[3], move="replay")
        steps = 0
        while fleet.states:
            stage_id = lose.get(steps)
            if stage_id is not None and (run := fleet.states["r"].runs.get(stage_id)) and run.replica_id is not None:
                replica_id = run.replica_id
                fleet.kill(stage_id, replica_id)
                fleet.join(fleet.pools[stage_id].member(replica_id))
            if not await advance(fleet):
                break
            steps += 1
        await fleet.read()
        assert fleet.states == {}
        assert fleet.in_flight == 0
        assert fleet.ends == [("r", "stop")]
        assert fleet.call_ends("r") == [None]
        return fleet.received("r"), steps


@pytest.mark.parametrize(("stages", "modalities"), KINDS)
async def test_a_loss_in_any_stage_at_any_moment_changes_nothing_that_the_client_gets(
    stages: Sequence[Stage], modalities: Sequence[str]
) -> None:
    undisturbed, steps = await run(stages, modalities, {})
    assert steps > 6
    for stage in stages:
        for step in range(steps):
            assert (await run(stages, modalities, {step: stage.id}))[0] == undisturbed, (stage.name, step)


@pytest.mark.parametrize("stage_id", [0, 1, 2])
async def test_losses_before_every_step_change_nothing_either(stage_id: int) -> None:
    undisturbed, _ = await run(SPEECH, ["text", "audio"], {})
    losses = dict.fromkeys(range(9), stage_id)
    assert (await run(SPEECH, ["text", "audio"], losses))[0] == undisturbed


async def test_a_moved_session_keeps_all_chunks_including_those_that_came_without_a_replica() -> None:
    async with FakePipelineFleet(SPEECH, replicas=[1, 1, 1], replica_wait=600.0) as fleet:
        await fleet.submit("r", "text", "audio", prompt=[3])
        for _ in range(3):
            await fleet.step("r", 0)
        await fleet.step("r", 1)
        fleet.lose(1, 0)
        await fleet.step("r", 0)
        assert fleet.orchestrator.metrics.waiting_in[1]().held == 1
        link = fleet.join(fleet.pools[1].member(0))
        assert [body["prompt"] for body in link.requests] == [[4, 7], [10, 13], []]
        assert [body["resumable"] for body in link.requests] == [True, True, False]
        assert len({body["request_id"] for body in link.requests}) == 1
        swallowed = fleet.orchestrator.metrics.tokens_swallowed
        await fleet.finish()
        assert fleet.orchestrator.metrics.tokens_swallowed == swallowed + 1
        assert fleet.call_ends("r") == [None]


async def test_a_session_keeps_its_chunks_when_the_replica_it_moves_to_is_dead_too() -> None:
    async with FakePipelineFleet(SPEECH, replicas=[1, 2, 1], replica_wait=600.0) as fleet:
        await fleet.submit("r", "text", "audio", prompt=[3])
        for _ in range(4):
            await fleet.step("r", 0)
        dying = fleet.attempt("r", 1)[0]
        for link in (fleet.links[1, 0], fleet.links[1, 1]):
            link.broken = True
        dying.say_dead()
        assert fleet.orchestrator.metrics.waiting_in[1]().held == 1
        link = fleet.join(fleet.pools[1].member(0))
        assert [body["prompt"] for body in link.requests] == [[4, 7], [10, 13], []]
        await fleet.finish()
        assert fleet.call_ends("r") == [None]


async def test_a_session_whose_turns_had_all_been_delivered_ends_when_its_replay_has_been_swallowed() -> None:
    transform = {"talker": lambda transfer: "nothing" if transfer.last else None}
    async with FakePipelineFleet(SPEECH, replicas=2) as fleet:
        await fleet.submit("r", "text", "audio", outputs=["talker"], prompt=[3], params=transform)
        for _ in range(3):
            await fleet.step("r", 0)
        await fleet.step("r", 1, count=9)
        before = fleet.shown("r", "talker")
        fleet.attempt("r", 1)[0].say_dead()
        await fleet.step("r", 0)
        assert not fleet.states["r"].runs[1].finished
        await fleet.finish()
        assert fleet.shown("r", "talker") == before != []
        assert fleet.call_ends("r") == [None]


async def test_a_session_is_not_over_when_one_turn_has_all_its_tokens() -> None:
    async with FakePipelineFleet(SPEECH, replicas=2) as fleet:
        await fleet.submit("r", "text", "audio", outputs=["talker"], prompt=[3], length=2)
        for _ in range(4):
            await fleet.step("r", 0)
        await fleet.step("r", 1, count=2)
        fleet.attempt("r", 1)[0].say_dead()
        assert not fleet.states["r"].runs[1].finished
        await fleet.finish()
        assert fleet.call_ends("r") == [None]
    undisturbed, _ = await run(SPEECH, ["text", "audio"], {})
    assert fleet.shown("r", "talker") == undisturbed["talker"]


@pytest.mark.parametrize("stage_id", [0, 1, 2])
async def test_a_stage_may_move_as_often_as_the_limit_and_then_the_request_fails(stage_id: int) -> None:
    async with FakePipelineFleet(SPEECH, replicas=2, migration_limit=1) as fleet:
        await fleet.submit("r", "text", "audio", prompt=[3], move="replay")
        while stage_id not in fleet.states["r"].runs:
            await advance_before(fleet, stage_id)
        for left in (1, 0):
            run = fleet.states["r"].runs[stage_id]
            replica_id = run.replica_id
            assert replica_id is not None
            fleet.lose(stage_id, replica_id)
            fleet.join(fleet.pools[stage_id].member(replica_id))
            assert ("r" in fleet.states) == bool(left)
        await fleet.read()
        error = fleet.ends[-1][1]
        assert isinstance(error, RequestLostError)
        assert fleet.call_ends("r") == [error]
        assert fleet.in_flight == 0


async def advance_before(fleet: FakePipelineFleet, stage_id: int) -> None:
    for name, other in list(fleet.at_work(list(fleet.states))):
        if other < stage_id and name in fleet.states:
            await fleet.step(name, other)


async def test_the_moves_of_one_stage_do_not_count_for_another() -> None:
    async with FakePipelineFleet(CHAIN, replicas=2, migration_limit=1) as fleet:
        await fleet.submit("r", "text", move="replay")
        for stage_id in (0, 1):
            fleet.attempt("r", stage_id)[0].say_dead()
            await fleet.step("r", stage_id, count=9)
        assert fleet.call_ends("r") == [None]


async def test_a_replay_that_diverges_fails_the_request() -> None:
    async with FakePipelineFleet(SPEECH, replicas=2) as fleet:
        await fleet.submit("r", "text", "audio", prompt=[3])
        for _ in range(3):
            await fleet.step("r", 0)
        await fleet.step("r", 1)
        fleet.attempt("r", 1)[0].say_dead()
        fleet.tell("r", 1, 99)
        await fleet.read()
        error = fleet.ends[-1][1]
        assert isinstance(error, RequestLostError)
        assert fleet.call_ends("r") == [error]
        assert fleet.orchestrator.metrics.replays_diverged == 1
        assert fleet.in_flight == 0


@pytest.mark.parametrize("delivered", [False, True])
async def test_the_last_replica_of_a_stage_is_lost(delivered: bool) -> None:
    async with FakePipelineFleet(CHAIN) as fleet:
        await fleet.submit("r", "text", move="replay")
        if delivered:
            await fleet.step("r", 0)
        fleet.lose(0, 0)
        await fleet.read()
        ((_, error),) = fleet.ends
        assert type(error) is (RequestLostError if delivered else NoReplicaError)
        assert str(error).startswith("Stage 'thinker': ")
        assert fleet.call_ends("r") == [error]
