"""The check for a machine with a GPU: every step ends, and the table has what was found before it did."""

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from tools.gpu_check import Check, Figure, Row, run, table
from tools.gpu_fleet import Fleet


class Steps(Check):
    """One step hangs, one fails; the others take no time."""

    def __init__(self) -> None:
        super().__init__(lambda: None, self._no_fleet)

    @staticmethod
    def _no_fleet(mode: str) -> Fleet:
        raise RuntimeError("no GPU")

    def one_engine(self, mode: str) -> Iterator[Figure]:
        yield "seconds to start", 1.5
        threading.Event().wait()

    def two_at_once(self, mode: str) -> Iterator[Figure]:
        yield "memory, MiB", 7
        raise RuntimeError("the server ended with code 1")

    def killed_engine(self, mode: str) -> Iterator[Figure]:
        yield "streams", "8 of 8"


@pytest.fixture(autouse=True)
def _alarm() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, handler)


def test_a_step_that_hangs_or_fails_keeps_its_figures_and_the_others_follow() -> None:
    rows: list[Row] = []
    run(Steps(), rows, ["eager"], time.monotonic() + 100, 0.1)
    assert rows == [
        ("eager", "model", "seconds to make", "0.0"),
        ("eager", "one_engine", "seconds to start", "1.5"),
        ("eager", "one_engine", "FAILED", "not within 0.1 s"),
        ("eager", "two_at_once", "memory, MiB", "7"),
        ("eager", "two_at_once", "FAILED", "RuntimeError: the server ended with code 1"),
        ("eager", "same_answers", "FAILED", "RuntimeError: no fleet of two runs"),
        ("eager", "killed_engine", "streams", "8 of 8"),
        ("eager", "sleep_and_wake", "FAILED", "RuntimeError: no fleet of two runs"),
        ("eager", "one_after_another", "FAILED", "RuntimeError: no GPU"),
    ]
    assert table(rows).splitlines()[4] == "| eager | one_engine | FAILED | not within 0.1 s |"
