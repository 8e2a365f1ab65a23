"""Work that ends is restarted, with exponential backoff."""

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager

import pytest

from vllm_omni_plugin.keep_running import Backoff, keep_running


class Runs:
    """Work to keep running: each entry of `lives` is seconds in service, or an error of the start."""

    def __init__(self, *lives: float | Exception) -> None:
        self.lives = list(lives)
        self.now = 0.0
        self.pauses: list[tuple[float, str]] = []
        self.left = 0
        self.fault: Exception | None = None

    @asynccontextmanager
    async def start(self) -> AsyncIterator[Awaitable[str]]:
        life = self.lives.pop(0)
        if isinstance(life, Exception):
            raise life
        try:
            yield self.end(life)
        finally:
            self.left += 1
            if self.fault is not None:
                raise self.fault

    async def end(self, served: float) -> str:
        self.now += served
        return "ended"

    async def pause(self, seconds: float, reason: str | Exception) -> bool:
        self.pauses.append((seconds, str(reason)))
        # Time in a pause does not count as service.
        self.now += 1000.0
        return bool(self.lives)

    async def keep(self, *, must_start: bool = True) -> list[float]:
        await keep_running(self.start, Backoff(), lambda: self.now, self.pause, must_start=lambda: must_start)
        return [seconds for seconds, _ in self.pauses]


@pytest.mark.parametrize(
    ("lives", "pauses"),
    [([1.0] * 9, [1, 2, 4, 8, 16, 32, 60, 60, 60]), ([1.0, 1.0, 60.0, 1.0], [1, 2, 1, 2])],
    ids=["up to the longest", "again from the first after a minute in service"],
)
async def test_pauses_double(lives: list[float], pauses: list[float]) -> None:
    assert await Runs(*lives).keep() == pauses


async def test_a_failed_restart_is_retried_after_any_error() -> None:
    runs = Runs(1.0, KeyError("a fault of ours"), OSError("no memory"), 1.0)
    assert await runs.keep() == [1, 2, 4, 8]
    assert [reason for _, reason in runs.pauses] == ["ended", "'a fault of ours'", "no memory", "ended"]
    assert runs.left == 2


async def test_an_error_of_the_first_start_is_raised_unless_it_may_fail() -> None:
    with pytest.raises(OSError, match="no memory"):
        await Runs(OSError("no memory"), 1.0).keep()
    assert await Runs(OSError("no memory"), 1.0).keep(must_start=False) == [1, 2]


@pytest.mark.parametrize("fault", [None, OSError("nothing can be freed")])
async def test_a_cancellation_frees_the_resources(fault: Exception | None) -> None:
    runs = Runs(1.0, 1.0)
    runs.fault = fault
    never: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    runs.end = lambda served: never  # type: ignore[assignment,method-assign,return-value]
    keeping = asyncio.create_task(runs.keep())
    await asyncio.sleep(0)
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    assert (runs.left, runs.pauses) == (1, [])


async def test_an_error_is_freed_before_the_next_start() -> None:
    """It has the frames of what it ended, such as an engine with its descriptors."""
    errors: list[weakref.ref[RefusedError]] = []
    kept: list[weakref.ref[RefusedError]] = []

    @asynccontextmanager
    async def start() -> AsyncIterator[Awaitable[str]]:
        kept.extend(error for error in errors if error() is not None)
        refused = RefusedError()
        errors.append(weakref.ref(refused))
        try:
            raise refused
        finally:
            # Otherwise its own frame has it.
            del refused
        yield asyncio.sleep(0, "ended")

    async def pause(seconds: float, reason: str | Exception) -> bool:
        return len(errors) < 3

    gc.disable()
    try:
        await keep_running(start, Backoff(), lambda: 0.0, pause, must_start=lambda: False)
    finally:
        gc.enable()
    assert len(errors) == 3
    assert not kept


class RefusedError(Exception):
    """Built-in errors cannot be referred to weakly."""
