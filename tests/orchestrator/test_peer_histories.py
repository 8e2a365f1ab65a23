"""Whatever happens to three heads and their messages, they agree in the end, with each other and with the engines."""

import asyncio
from contextlib import AsyncExitStack
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.fakes.conditions import eventually
from tests.fakes.links import FakeLink
from tests.orchestrator.head_bus import FakeHead, HeadBus
from tests.orchestrator.test_shared_state import EngineModel, RefusedError
from vllm_omni_plugin.vllm_api.adapter import Adapter

HEADS = "abc"
AT_ONCE = "call at once with what follows"
X, Y = ("add_lora", Adapter("x", 1, "/x")), ("add_lora", Adapter("y", 2, "/y"))
CALLS = st.sampled_from(
    [
        X,
        Y,
        ("forget_lora", 1),
        ("pin_lora", 2),
        ("set_weight_version", "v1"),
        ("set_weight_version", "v2"),
        ("pause_scheduler", "keep", True),
        ("pause_scheduler", "abort", True),
        ("resume_scheduler",),
        ("sleep", 1, "abort"),
        ("wake_up", None),
        ("wake_up", ["weights"]),
    ]
)
STEPS = st.one_of(
    st.tuples(st.just("call"), st.sampled_from(HEADS), CALLS),
    st.tuples(st.just(AT_ONCE), st.sampled_from(HEADS), CALLS),
    st.tuples(st.just("drain"), st.sampled_from(HEADS), st.integers(0, 1)),
    st.tuples(st.just("resume"), st.sampled_from(HEADS), st.integers(0, 1)),
    st.tuples(st.just("deaf"), st.sampled_from(HEADS), st.none()),
    st.tuples(st.just("hears"), st.sampled_from(HEADS), st.none()),
    st.tuples(st.just("restart"), st.sampled_from(HEADS), st.none()),
)


class Fleet:
    """Two engines, and three heads attached to both."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.bus = HeadBus()
        self.engines = [EngineModel(), EngineModel()]
        self.heads: dict[str, FakeHead] = {}
        self.calling: list[asyncio.Future[Any]] = []
        self._stack = stack
        self._started = 0

    async def start(self, name: str) -> None:
        """A head comes, under an id that no head before it had."""
        self._started += 1
        head = await self._stack.enter_async_context(FakeHead(self.bus, f"{name}{self._started}"))
        for replica_id, link in head.links.items():
            link.on_call = self._answer(self.engines[replica_id])
        head.may_remind.set()
        self.heads[name] = head
        await head.take_seat()

    async def take(self, step: str, name: str, what: Any) -> None:
        head = self.heads[name]
        match step:
            case "call":
                await asyncio.wait([asyncio.ensure_future(head.call(*what))])
            case "call at once with what follows":
                self.calling.append(asyncio.ensure_future(head.call(*what)))
            case "drain":
                await head.manage("drain", what)
            case "resume" if "admin" in head.pool.member(what).held_back:
                await head.manage("resume", what)
            case "deaf":
                self.bus.deaf.add(head.head_id)
            case "hears":
                self.bus.deaf.discard(head.head_id)
            case "restart":
                head.leave()
                await self.start(name)

    def _answer(self, engine: EngineModel) -> Any:
        def answer(link: FakeLink, call_id: int, method: str, args: list[Any]) -> None:
            try:
                engine.apply(method, [Adapter(*args[0])] if method == "add_lora" else args)  # type: ignore[arg-type]
            except RefusedError:
                link.refuse(call_id)
            else:
                link.answer(call_id)

        return answer


@settings(max_examples=40)
@example([("deaf", "a", None), (AT_ONCE, "b", X), (AT_ONCE, "c", Y), ("call", "a", X), ("call", "b", X)])
@example([(AT_ONCE, "a", ("pin_lora", 2)), ("drain", "a", 0), ("restart", "a", None)])
@example([(AT_ONCE, "b", X), ("restart", "a", None), ("deaf", "a", None), ("call", "a", Y), ("call", "b", X)])
@given(st.lists(STEPS, max_size=14))
def test_heads_agree_with_each_other_and_with_the_engines(steps: list[tuple[str, str, Any]]) -> None:
    asyncio.run(run(steps))


async def run(steps: list[tuple[str, str, Any]]) -> None:
    async with AsyncExitStack() as stack:
        fleet = Fleet(stack)
        for name in HEADS:
            await fleet.start(name)
        for step in steps:
            await fleet.take(*step)
        await asyncio.gather(*fleet.calling, return_exceptions=True)
        fleet.bus.deaf.clear()
        # A head that was cut off takes its seat again.
        for head in fleet.heads.values():
            head.peers.synchronise()
        await eventually(lambda: agree(fleet), f"agreement after {steps}")
        if not {"deaf", AT_ONCE} & {step for step, _, _ in steps}:
            assert [told_to_rest(engine) for engine in fleet.engines] == [told_to_rest(joiner(fleet))] * 2


def agree(fleet: Fleet) -> bool:
    heads = list(fleet.heads.values())
    holds = [[member.held_back for member in head.pool.members] for head in heads]
    return all(head.replay == heads[0].replay for head in heads) and all(hold == holds[0] for hold in holds)


def joiner(fleet: Fleet) -> EngineModel:
    """An engine that attaches in the end."""
    engine = EngineModel()
    for method, args in fleet.heads["a"].replay:
        engine.apply(method, args)
    return engine


def told_to_rest(engine: EngineModel) -> tuple[Any, ...]:
    """What an engine was told, but for adapters, which stay when they are forgotten."""
    return engine.weight_version, engine.pause, engine.asleep
