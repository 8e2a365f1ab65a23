"""In place of `Probe`: the test says when an engine hangs and when it answers, so that no time limit runs."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from vllm_omni_plugin.replicas.engine import engine_keeper
from vllm_omni_plugin.replicas.engine.running_engine import Engine


class ToldProbe:
    """The probe of one engine. Make them with `told_probes`."""

    def __init__(
        self,
        engine: Engine,
        interval: float,
        timeout: float,
        on_hang: Callable[[str], None],
        on_answer: Callable[[], Awaitable[None]],
        clock: Callable[[], float],
    ) -> None:
        self.engine = engine
        self.hangs = lambda: on_hang("no answer")
        self._answered = asyncio.Event()
        self._on_answer = on_answer

    def answers(self) -> None:
        self._answered.set()

    async def run(self) -> str:
        lost = self.engine.lost
        while not lost.done():
            answered = asyncio.ensure_future(self._answered.wait())
            await asyncio.wait({answered, lost}, return_when=asyncio.FIRST_COMPLETED)
            if self._answered.is_set():
                self._answered.clear()
                await self._on_answer()
            answered.cancel()
        return lost.result()


def told_probes(monkeypatch: pytest.MonkeyPatch) -> list[ToldProbe]:
    """Engines get a `ToldProbe` from now on. Returns the list that these are added to."""
    made: list[ToldProbe] = []

    def make(*args: object) -> ToldProbe:
        made.append(ToldProbe(*args))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(engine_keeper, "Probe", make)
    return made
