"""docs/how-to/upgrade.md under load: two generations at one coordinator, and no request meets both."""

import asyncio
import itertools
import os
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from vllm.sampling_params import SamplingParams

from tests.contract.stage_models import REVERSED, config, model, source
from tests.fakes.conditions import eventually
from tests.sim.drive import answer
from tests.sim.drive import request as sim_request
from tests.sim.protocol.requests import request
from tests.sim.protocol.test_sim_pipeline import LENGTH, REFINER, THINKER, by_hand
from tests.sim.protocol.test_sim_pipeline import PROMPT as PIPELINE_PROMPT
from tests.sim.protocol.test_sim_pipeline import SETTINGS as PIPELINE_SETTINGS
from tests.sim.protocol.whole_heads import SETTINGS, WholeHead, open_nodes
from vllm_omni_plugin.coordinator import OmniCoordinator, OmniCoordinatorRuntime
from vllm_omni_plugin.orchestrator.event_log import EventKind
from vllm_omni_plugin.orchestrator.multi_stage.input_builder import StageInputBuilder
from vllm_omni_plugin.orchestrator.pool.pool_member import OTHER_GENERATION
from vllm_omni_plugin.pipeline import Pipeline
from vllm_omni_plugin.vllm_api.vllm_stages.stage_requests import VllmStageApi

NODES, CLIENTS, PROMPT, TOKENS = 3, 12, 8, 60
OLD = {"model": "simulated", "vLLM version": "0.32.0"}
NEW = {"model": "simulated", "vLLM version": "0.33.0"}
UNUSED, USED = False, True
# Another seed gives other tokens, as another version may.
OLD_ENGINES, NEW_ENGINES = replace(SETTINGS, step_s=0.005, seed=1), replace(SETTINGS, step_s=0.005, seed=2)


class Ingress:
    """Clients that send one request after the other to the head that it points to; `sent` has the head of each."""

    def __init__(self, head: WholeHead, make: Callable[[str], Any]) -> None:
        self.head = head
        self._make = make
        self.sent: dict[str, WholeHead] = {}
        self._open = True
        self._numbers = itertools.count()
        self._clients = [asyncio.create_task(self._send_requests()) for _ in range(CLIENTS)]

    async def _send_requests(self) -> None:
        while self._open:
            name, head = f"request-{next(self._numbers)}", self.head
            self.sent[name] = head
            head.submit(self._make(name))
            await eventually(lambda name=name, head=head: name in head.ended, "an answer")  # type: ignore[misc]

    async def more(self) -> None:
        """Return once each client has sent two more requests to the present head."""
        wanted = len(self.sent) + 2 * CLIENTS
        await eventually(lambda: len(self.sent) >= wanted, "more requests")

    async def close(self) -> None:
        self._open = False
        await asyncio.gather(*self._clients)


def shown(head: WholeHead) -> list[bool]:
    """For each replica of the other generation that a head shows, whether it says that some head uses it."""
    members = [member for pool in head.pools for member in pool.members]
    others = [member for member in members if member.state == OTHER_GENERATION]
    return ["no head of its kind" not in member.other_generation for member in others]


async def test_an_upgrade_loses_no_request_and_none_is_answered_by_two_generations() -> None:
    coordinator = OmniCoordinator("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    address = coordinator.router_zmq_addr
    async with AsyncExitStack() as stack:
        stack.callback(lambda: coordinator.close())
        old_nodes = await stack.enter_async_context(open_nodes(address, NODES, OLD_ENGINES, OLD))
        old = await stack.enter_async_context(old_nodes())
        ingress = Ingress(old, lambda name: request(name, PROMPT, max_tokens=TOKENS, ignore_eos=True))
        await ingress.more()

        new_nodes = await stack.enter_async_context(open_nodes(address, NODES, NEW_ENGINES, NEW))
        await eventually(lambda: shown(old) == [UNUSED] * NODES, "the old head shows the new nodes")
        await old.fleet_calls.call("set_weight_version", ("of the old ones",), [0])
        async with new_nodes() as new:
            await eventually(lambda: shown(new) == shown(old) == [USED] * NODES, "both generations are in use")
            assert new.fleet_calls.state.version == 0
            # A replica is lost while others of its own and of the other generation are free.
            old_nodes.servers[0].stop_now("the test takes it")
            await eventually(lambda: old.orchestrator.metrics.moves > 0, "its requests move")
            await ingress.more()

            ingress.head = new
            await ingress.more()
            await eventually(lambda: not old.orchestrator.request_states, "the old head has finished")
            for server in old_nodes.servers:
                server.drain()
            # The coordinator ends with the old head, and starts again beside a new one.
            coordinator.close()
            await ingress.more()
            coordinator = OmniCoordinator(address, "tcp://127.0.0.1:*", settle_time=0.5)
            await eventually(lambda: shown(new) == [], "the old nodes have gone")
            await ingress.more()
            await ingress.close()
            assert len(new.pool.serving) == NODES

    asked = sim_request("", PROMPT, TOKENS)
    by_head = {old: answer(asked, OLD_ENGINES), new: answer(asked, NEW_ENGINES)}
    assert by_head[old] != by_head[new]
    assert {name: head.ended[name] for name, head in ingress.sent.items()} == dict.fromkeys(ingress.sent, "length")
    wrong = [name for name, head in ingress.sent.items() if head.tokens[name] != by_head[head]]
    assert wrong == []


async def test_heads_of_both_generations_join_a_coordinator_that_followed_the_one_of_the_old_head() -> None:
    # The old head, and so the coordinator, ends before the new one has joined. Then the old version comes back.
    coordinator = OmniCoordinator("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", fingerprints={0: OLD})
    address = coordinator.router_zmq_addr
    async with AsyncExitStack() as stack:
        stack.callback(lambda: coordinator.close())
        old_nodes = await stack.enter_async_context(open_nodes(address, NODES, OLD_ENGINES, OLD))
        new_nodes = await stack.enter_async_context(open_nodes(address, NODES, NEW_ENGINES, NEW))
        async with old_nodes() as first:
            await eventually(lambda: shown(first) == [UNUSED] * NODES, "the old head shows the new nodes")
            coordinator.close()
        joining = asyncio.create_task(stack.enter_async_context(new_nodes()))
        coordinator = OmniCoordinator(address, "tcp://127.0.0.1:*", settle_time=0.5, fingerprints={0: NEW})
        new = await joining
        await new.fleet_calls.call("set_weight_version", ("of the new ones",), [0])
        old = await stack.enter_async_context(old_nodes())
        await eventually(lambda: shown(new) == shown(old) == [USED] * NODES, "both generations are in use")
        assert (old.fleet_calls.state.version, new.fleet_calls.state.version) == (0, 1)


THINKERS, REFINERS = (replace(PIPELINE_SETTINGS, step_s=0.005, seed=seed) for seed in (1, 2))
NEW_REFINERS = replace(REFINERS, seed=3)


async def test_a_pipeline_that_is_upgraded_in_one_stage_loses_no_request_and_none_meets_both_refiners(
    tmp_path: Path,
) -> None:
    configs = [config(model(tmp_path / "thinker")), config(model(tmp_path / "refiner", REVERSED))]
    params = SamplingParams(max_tokens=LENGTH, temperature=0, ignore_eos=True)

    def new_head(address: str, refiner: dict[str, str], attached: int) -> WholeHead:
        stages = (THINKER, REFINER)
        apis = [VllmStageApi(own, configs[0], stage) for own, stage in zip(configs, stages, strict=True)]
        builder = StageInputBuilder(Pipeline(stages), apis, apis[0].prompt_text)
        return WholeHead(address, refiner["vLLM version"], attached, {0: OLD, 1: refiner}, builder)

    coordinator = OmniCoordinator("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    address = coordinator.router_zmq_addr
    async with AsyncExitStack() as stack:
        stack.callback(coordinator.close)
        await stack.enter_async_context(open_nodes(address, 2, THINKERS, OLD))
        old_refiners = await stack.enter_async_context(open_nodes(address, 2, REFINERS, OLD, 1))
        async with new_head(address, OLD, attached=4) as old:
            ingress = Ingress(old, lambda name: source(PIPELINE_PROMPT, params, request_id=name))
            await ingress.more()
            await stack.enter_async_context(open_nodes(address, 2, NEW_REFINERS, NEW, 1))
            await eventually(lambda: shown(old) == [UNUSED] * 2, "the old head shows the new refiners")
            new = await stack.enter_async_context(new_head(address, NEW, attached=2))
            await eventually(lambda: shown(new) == shown(old) == [USED] * 2, "both kinds of refiners are in use")
            old_refiners.servers[0].stop_now("the test takes it")
            await ingress.more()
            ingress.head = new
            # The thinkers are the old head's, as long as it runs.
            await eventually(lambda: len(new.orchestrator.request_states) == CLIENTS, "all wait at the new head")
            assert new.ended == {}
        await ingress.more()
        await ingress.close()

    by_head = {old: by_hand(THINKERS, REFINERS), new: by_hand(THINKERS, NEW_REFINERS)}
    assert by_head[old] != by_head[new]
    assert {name: head.ended[name] for name, head in ingress.sent.items()} == dict.fromkeys(ingress.sent, "length")
    assert [name for name, head in ingress.sent.items() if head.tokens[name] != by_head[head]] == []


REPLICAS, STREAMS = 16, 48
ENDLESS = 90_000


def addresses(head: WholeHead) -> dict[str, str]:
    """The replicas of a head by name."""
    return {member.name: member.input_addr for member in head.pool.members}


async def each_goes_on(head: WholeHead) -> None:
    before = dict(head.produced)
    await eventually(lambda: all(head.produced[name] > count for name, count in before.items()), "all streams go on")


async def test_no_stream_of_a_joined_head_moves_and_no_replica_is_renumbered() -> None:
    runtime = await asyncio.to_thread(OmniCoordinatorRuntime, heartbeat_timeout=3.0)
    address = runtime.router_address
    try:
        async with open_nodes(address, REPLICAS, replace(SETTINGS, step_s=0.02)) as new_head, new_head() as joined:
            async with new_head() as first:
                names = addresses(joined)
                assert addresses(first) == names
                joined.submit(*[request(f"stream-{number}", max_tokens=ENDLESS) for number in range(STREAMS)])
                await eventually(lambda: len(joined.produced) == STREAMS, "all streams have begun")
                assert runtime.process_id is not None
                os.kill(runtime.process_id, signal.SIGKILL)
            await asyncio.to_thread(runtime.close)
            await each_goes_on(joined)
            port = int(address.rpartition(":")[2])
            runtime = await asyncio.to_thread(OmniCoordinatorRuntime, port=port, heartbeat_timeout=3.0)
            async with new_head() as successor:
                assert addresses(successor) == names
                await each_goes_on(joined)
            assert joined.ended == {}
            assert addresses(joined) == names
            kinds = {event.kind for event in joined.orchestrator.events.after()}
            assert kinds == {EventKind.ATTACH}
    finally:
        await asyncio.to_thread(runtime.close)
