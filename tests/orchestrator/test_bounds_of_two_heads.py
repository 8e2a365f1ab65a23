"""The bounds of the admission file hold for all that waits at two heads together."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack

from tests.fakes.fleet import FakeFleet
from tests.orchestrator.work_bus import Timers
from vllm_omni_plugin.admission import AdmissionConfig
from vllm_omni_plugin.coordinator import HeadWork, ReplicaWork, Welcome
from vllm_omni_plugin.errors import RequestRefusedError
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolTraits
from vllm_omni_plugin.orchestrator.pool.work_exchange import WorkExchange


async def test_what_waits_at_one_head_leaves_less_room_at_the_other() -> None:
    timers, heads = Timers(), list[FakeFleet]()

    def report_of(number: int) -> Callable[[Sequence[ReplicaWork], bool], None]:
        def report(work: Sequence[ReplicaWork], full: bool) -> None:
            other = heads[1 - number].exchange
            assert other is not None
            other.handle(HeadWork(str(number), full, list(work)))

        return report

    async def come(head: FakeFleet, names: str) -> list[str]:
        """Send these, one after the other; returns those that are refused."""
        for name in names:
            await head.submit(name, prompt=[1, 2])
            timers.advance(1.0)
        return [name for name, error in await head.read() if isinstance(error, RequestRefusedError)]

    async with AsyncExitStack() as stack:
        for number in range(2):
            exchange = WorkExchange(report_of(number), call_later=timers.call_later)
            head = FakeFleet(
                1,
                traits=PoolTraits(waits_for_room=True),
                exchange=exchange,
                plan=AdmissionConfig(max_waiting_requests=3),
            )
            heads.append(await stack.enter_async_context(head))
        for head in heads:
            assert head.exchange is not None
            head.exchange.handle(Welcome([]))
        timers.advance(1.0)
        # The engine of each gets the first two.
        assert await come(heads[0], "abcd") == []
        assert await come(heads[1], "efgh") == ["h"]
        assert await come(heads[0], "i") == ["i"]
        heads[0].say("a", 1)
        timers.advance(1.0)
        assert await come(heads[1], "jk") == ["k"]
