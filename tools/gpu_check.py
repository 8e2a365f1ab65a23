"""What a fleet does on one GPU that two replicas share, in ten minutes: a table of figures, and what failed.

    python -m tools.gpu_check [--model MODEL] [-- more flags of the engines]

Every step has a time limit, and the table comes last, whatever fails. `--device cpu` runs the same steps with vLLM's
CPU build. Needs psutil, and nvidia-smi for the memory of the GPU.
"""

import argparse
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType

from .gpu_fleet import ENGINES, NAME, PROMPTS, TOKENS, Fleet, until

Figure = tuple[str, object]
LONG = 4 * TOKENS
"""Tokens of an answer whose engine is killed before it is complete."""
TINY_MODEL = Path(__file__).parents[1] / "examples" / "cpu" / "tiny_model.py"
MODES = {"eager": ["--enforce-eager"], "graphs": []}


class StepTimeoutError(Exception):
    """The time of a step is up."""


class Check:
    """The steps. Each yields its figures as it finds them; `fleet` and `expected` are what earlier steps left."""

    def __init__(self, make_model: Callable[[], object], make_fleet: Callable[[str], Fleet]) -> None:
        self._make_model = make_model
        self._make_fleet = make_fleet
        self.fleet: Fleet | None = None
        self.expected: list[str | None] = []

    def renew(self, mode: str) -> Fleet:
        if self.fleet is not None:
            self.fleet.stop()
        self.fleet = self._make_fleet(mode)
        return self.fleet

    def model(self, mode: str) -> Iterator[Figure]:
        start = time.monotonic()
        self._make_model()
        yield "seconds to make", round(time.monotonic() - start, 1)

    def one_engine(self, mode: str) -> Iterator[Figure]:
        fleet = self.renew(mode)
        fleet.start_single()
        yield "seconds to start", until(fleet.is_up)
        self.expected = fleet.answers(at_once=False)
        yield "answers", f"{sum(text is not None for text in self.expected)} of {len(PROMPTS)}"
        yield from self._load(fleet)

    def two_at_once(self, mode: str) -> Iterator[Figure]:
        fleet = self.renew(mode)
        fleet.start_head()
        fleet.start_node()
        fleet.start_node()
        yield "seconds to start", until(partial(fleet.is_up, 2))
        yield "nodes started again", len(fleet.logs) - 3
        yield "memory, MiB", fleet.memory_mib()

    def one_after_another(self, mode: str) -> Iterator[Figure]:
        fleet = self.renew(mode)
        fleet.start_head()
        for number in (1, 2):
            fleet.start_node()
            yield f"seconds to start node {number}", until(partial(fleet.is_up, number))
        yield "nodes started again", len(fleet.logs) - 3
        yield "memory, MiB", fleet.memory_mib()

    def same_answers(self, mode: str) -> Iterator[Figure]:
        fleet = self._running()
        found = fleet.answers(at_once=False)
        yield "same as one engine", self._same(found, self.expected)
        yield from self._load(fleet)

    def killed_engine(self, mode: str) -> Iterator[Figure]:
        fleet = self._running()
        undisturbed = fleet.answers(at_once=True, tokens=LONG)
        yield "memory before, MiB", fleet.memory_mib()
        of_replica: list[int] = []

        def kill() -> None:
            of_replica.extend(replica["total_in_flight"] for replica in fleet.replicas())
            fleet.kill_engine()

        found = fleet.answers(at_once=True, tokens=LONG, started=kill)
        yield "streams of each replica", of_replica
        yield "streams that ended well", f"{sum(text is not None for text in found)} of {len(found)}"
        yield "same as undisturbed", self._same(found, undisturbed)
        until(lambda: not fleet.is_up(2))
        yield "memory after, MiB", fleet.memory_mib()
        yield "seconds until two serve again", until(partial(fleet.is_up, 2))
        yield "memory then, MiB", fleet.memory_mib()

    def sleep_and_wake(self, mode: str) -> Iterator[Figure]:
        fleet = self._running()
        before = fleet.answers(at_once=False)
        yield "memory awake, MiB", fleet.memory_mib()
        fleet.call("POST", "/sleep?level=1")
        yield "memory asleep, MiB", fleet.memory_mib()
        start = time.monotonic()
        fleet.call("POST", "/wake_up")
        yield "seconds to wake", round(time.monotonic() - start, 2)
        yield "memory then, MiB", fleet.memory_mib()
        yield "same answers", self._same(fleet.answers(at_once=False), before)

    def _running(self) -> Fleet:
        if self.fleet is None or not self.fleet.is_up(2):
            raise RuntimeError("no fleet of two runs")
        return self.fleet

    @staticmethod
    def _same(found: list[str | None], expected: list[str | None]) -> str:
        same = sum(text is not None and text == wanted for text, wanted in zip(found, expected, strict=False))
        return f"{same} of {len(PROMPTS)}"

    @staticmethod
    def _load(fleet: Fleet) -> Iterator[Figure]:
        """Four rounds of all prompts at once."""
        before = fleet.cpu_seconds()
        start = time.monotonic()
        complete = sum(text is not None for _ in range(4) for text in fleet.answers(at_once=True))
        seconds = time.monotonic() - start
        yield "tokens per second", round(complete * TOKENS / seconds)
        for name, used in fleet.cpu_seconds().items():
            yield f"CPU ms per answer: {name}", round((used - before[name]) * 1000 / max(complete, 1))


Row = tuple[str, str, str, str]


def run(check: Check, rows: list[Row], modes: list[str], deadline: float, limit: float) -> None:
    """Take all steps, each for at most `limit` seconds, and add what they yield to the rows."""

    def expire(number: int, frame: FrameType | None) -> None:
        raise StepTimeoutError

    def add(what: str, figure: object) -> None:
        rows.append((mode, step.__name__, what, str(figure)))
        print(*rows[-1], sep=" | ", flush=True)

    signal.signal(signal.SIGALRM, expire)
    for mode in modes:
        repeated = (check.two_at_once, check.same_answers, check.killed_engine)
        more = (check.sleep_and_wake, check.one_after_another)
        for step in (check.model, check.one_engine, *repeated, *more) if mode == modes[0] else repeated:
            left = deadline - time.monotonic()
            if left < 1:
                add("skipped", "no time is left")
                continue
            seconds = min(limit, left)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            try:
                for figure in step(mode):
                    add(*figure)
            except StepTimeoutError:
                add("FAILED", f"not within {seconds:.1f} s")
            except Exception as error:
                add("FAILED", f"{type(error).__name__}: {error}")
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)


def table(rows: list[Row]) -> str:
    """The rows as Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in [("mode", "step", "what", "figure"), ("---",) * 4, *rows])


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", help="a folder with a model; by default a tiny one is made")
    parser.add_argument("--device", choices=ENGINES, default="cuda")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--seconds", type=float, default=540, help="for all steps")
    parser.add_argument("--step-seconds", type=float, default=120, help="for each step")
    parser.add_argument("--dtype", default="float32", help="with others, an answer that moves may change by rounding")
    parser.add_argument("--logs", type=Path, help="a folder for what the processes print")
    parser.add_argument("flags", nargs="*", help="more flags of the engines, after --")
    args = parser.parse_args()
    deadline = time.monotonic() + args.seconds
    # It ends as after an error: with the table and without processes.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory() as scratch:
        secret = Path(scratch, "secret")
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        model = args.model or str(Path(scratch, "tiny"))
        making = [] if args.model else [sys.executable, "-W", "ignore", str(TINY_MODEL), model]
        common = [model, "--served-model-name", NAME, "--max-model-len", "1024", "--dtype", args.dtype]
        logs = args.logs or Path(scratch, "logs")
        logs.mkdir(parents=True, exist_ok=True)
        check = Check(
            lambda: making and subprocess.run(making, check=True),
            lambda mode: Fleet(args.device, [*MODES[mode], *ENGINES[args.device], *args.flags], common, secret, logs),
        )
        rows: list[Row] = []
        try:
            run(check, rows, args.modes, deadline, args.step_seconds)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            if check.fleet is not None:
                check.fleet.stop()
            print(table(rows), flush=True)
    return int(any(what in ("FAILED", "skipped") for _, _, what, _ in rows))


if __name__ == "__main__":
    raise SystemExit(main())
