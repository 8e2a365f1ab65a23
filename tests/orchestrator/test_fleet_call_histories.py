"""Whatever happens to three heads and their coordinator, they agree in the end, with each other and the engines."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fakes.conditions import eventually
from tests.fakes.engine_model import EngineModel, RefusedError
from tests.fakes.links import FakeLink
from tests.fakes.virtual_time import VirtualTimeLoop
from tests.orchestrator.head_bus import FakeHead, HeadBus
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter

HEADS = "abc"
AT_ONCE = "call at once with what follows"
LOAD = ("add_lora", Adapter("x", 1, "/x"))
KEEP, ABORT, SLEEP = ("pause_scheduler", "keep", True), ("pause_scheduler", "abort", True), ("sleep", 1, "abort")
WAKE_CACHE, RELEASE = ("wake_up", ["kv_cache"]), ("release_kv_cache_memory",)
CALLS = st.sampled_from(
    [
        LOAD,
        KEEP,
        ABORT,
        SLEEP,
        ("add_lora", Adapter("y", 2, "/y")),
        ("forget_lora", 1),
        ("pin_lora", 2),
        ("set_weight_version", "v1"),
        ("set_weight_version", "v2"),
        ("resume_scheduler",),
        ("wake_up", None),
        ("wake_up", ["weights"]),
        WAKE_CACHE,
        RELEASE,
    ]
)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["call", AT_ONCE]), st.sampled_from(HEADS), CALLS),
    st.tuples(st.sampled_from(["drain", "resume"]), st.sampled_from(HEADS), st.integers(0, 1)),
    st.tuples(st.sampled_from(["cut", "connect", "restart", "coordinator"]), st.sampled_from(HEADS), st.none()),
)
UNDISTURBED = {"call", AT_ONCE, "drain", "resume"}


class Fleet:
    """Two engines, and three heads attached to both, each of which has another one for itself.

    Attributes:
        private: the engines that only one head reaches, by the head.
    """

    def __init__(self, stack: AsyncExitStack) -> None:
        self.bus = HeadBus()
        self.engines = [EngineModel(), EngineModel()]
        self.private: dict[FakeHead, EngineModel] = {}
        self.heads: dict[str, FakeHead] = {}
        self.calling: list[asyncio.Future[Any]] = []
        self._stack = stack
        self._started = 0

    async def start(self, name: str) -> None:
        """A head comes, under an id that no head before it had."""
        self._started += 1
        head = await self._stack.enter_async_context(FakeHead(self.bus, f"{name}{self._started}"))
        head.attach(1 + self._started, private=True)
        self.private[head] = EngineModel()
        for link, engine in zip(head.links.values(), [*self.engines, self.private[head]], strict=True):
            link.on_call = self._answer(engine)
        self.heads[name] = head
        await head.join_fleet()

    async def perform(self, step: str, name: str, what: Any) -> None:
        head = self.heads[name]
        match step:
            case "call":
                await asyncio.gather(head.call(*what), return_exceptions=True)
            case "call at once with what follows":
                self.calling.append(asyncio.ensure_future(head.call(*what)))
            case "drain" | "resume" if step == "drain" or "admin" in head.pool.member(what).cordons:
                await asyncio.gather(head.manage(step, what), return_exceptions=True)
            case "cut":
                self.bus.cut(head)
            case "connect":
                self.bus.connect(head)
            case "restart":
                self.bus.cut(head)
                await self.start(name)
            case "coordinator":
                for other in self.heads.values():
                    self.bus.cut(other, noticed=False)
                self.bus.start()

    def _answer(self, engine: EngineModel) -> Any:
        def answer(link: FakeLink, call_id: int, method: str, args: list[Any]) -> None:
            try:
                engine.apply(method, [Adapter(*args[0])] if method == "add_lora" else args)  # type: ignore[arg-type]
            except RefusedError:
                link.refuse(call_id)
            else:
                link.answer(call_id)

        return answer


# Each takes 7 ms, since no time passes.
# A call that is made again, since another head was first, is later than what this head has called meanwhile.
@example([(AT_ONCE, "c", SLEEP), (AT_ONCE, "b", KEEP), (AT_ONCE, "c", ABORT)])
# The other head's call arrives after engines were called, and before the document is changed.
@example([(AT_ONCE, "a", LOAD), (AT_ONCE, "a", KEEP), (AT_ONCE, "b", ABORT)])
# A call begins right after that of another head has arrived.
@example([(AT_ONCE, "a", LOAD), (AT_ONCE, "b", LOAD), (AT_ONCE, "b", ABORT), ("call", "a", LOAD), ("call", "a", KEEP)])
# What the call that is made again leaves depends on the memory that sleeps.
@example([(AT_ONCE, "b", SLEEP), (AT_ONCE, "a", WAKE_CACHE)])
@example([(AT_ONCE, "b", WAKE_CACHE), (AT_ONCE, "b", KEEP), (AT_ONCE, "a", SLEEP)])
@example([(AT_ONCE, "b", RELEASE), (AT_ONCE, "a", KEEP)])
@settings(max_examples=150)
@given(st.lists(STEPS, max_size=14))
def test_heads_agree_with_each_other_and_with_the_engines(steps: list[tuple[str, str, Any]]) -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(run(steps))


async def run(steps: list[tuple[str, str, Any]]) -> None:
    async with AsyncExitStack() as stack:
        fleet = Fleet(stack)
        for name in HEADS:
            await fleet.start(name)
        for step in steps:
            await fleet.perform(*step)
        await asyncio.gather(*fleet.calling, return_exceptions=True)
        for head in fleet.heads.values():
            await head.join_fleet()
        fleet.bus.settle()
        await fleet.start("late")
        kinds = {step for step, _, _ in steps}
        undisturbed = kinds <= UNDISTURBED
        all_follow = undisturbed or AT_ONCE not in kinds
        await eventually(lambda: agree(fleet, all_follow), f"agreement after {steps}")
        if undisturbed:
            assert all(told_to_rest(engine) == told_to_rest(joiner(fleet)) for engine in trusted(fleet))


def agree(fleet: Fleet, all_follow: bool) -> bool:
    """Whether all heads have one document, and have applied it to their replicas and servers.

    Args:
        all_follow: whether the engines that a head has for itself follow, too. They need not if a head was cut off
            while calls overlapped: a weight version that only some have heard of is not taken back.
    """
    first, *others = fleet.heads.values()
    late = others[-1]
    return (
        all(head.fleet_calls.state == first.fleet_calls.state for head in others)
        and all(cordons(head) == cordons(first) for head in others)
        and (not all_follow or all(follows_privately(fleet, head) for head in (first, *others)))
        # The servers of the others have made calls themselves, and know of those without being told.
        and late.adapters == {each.lora_name: each for each in late.fleet_calls.state.of_stage(0).state.adapters}
        and late.sleep_level == late.fleet_calls.state.of_stage(0).state.sleep_level
    )


def trusted(fleet: Fleet) -> list[EngineModel]:
    """The shared engines that no head has taken out, since they had failed a call which others accepted."""
    heads = [fleet.heads[name] for name in HEADS]
    return [
        engine
        for member, engine in enumerate(fleet.engines)
        if all(head.pool.member(member).client is not None for head in heads)
    ]


def cordons(head: FakeHead) -> list[frozenset[str]]:
    return [frozenset(member.cordons) for member in head.pool.members if member.remote]


def follows_privately(fleet: Fleet, head: FakeHead) -> bool:
    """Whether a head's own engine has what a joiner gets, or has failed a call."""
    *_, own = head.pool.members
    return own.client is None or told_to_rest(fleet.private[head]) == told_to_rest(joiner(fleet))


def joiner(fleet: Fleet) -> EngineModel:
    engine = EngineModel()
    for method, args in fleet.heads["a"].replay:
        engine.apply(method, args)
    return engine


def told_to_rest(engine: EngineModel) -> tuple[Any, ...]:
    """What an engine was told, but for adapters, which stay when they are forgotten."""
    return engine.weight_version, engine.pause, engine.asleep
