"""A week of simulated time with churn: is every account of load 0 at rest, and is load as even on day 7 as on day 1?

    python benchmarks/simulated_week.py --markdown FILE
    python benchmarks/simulated_week.py --policies session --days 30 --requests 10

A head's own orchestrator, with its pool, dispatcher, moves, suspects and queues, in front of engines that are played,
on an event loop whose time jumps. Every 150 s a burst of requests comes, more by day than by night. In a quarter of the
bursts something befalls replicas: crashes, losses, drains, late heartbeats, others that join and leave, or the loss of
all. Half of the requests are turns of sessions, one of twenty is given up. Then all is at rest, and whatever the head
or an engine still counts is found. Clients know which tokens must come. Ends with 1 if anything was left, lost, failed
or wrong, or if load gets less even or the process larger.
"""

import argparse
import logging
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from processes import percentile
from simulator.contenders import OURS, build
from trends import Trend, trend

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# Uses `tests.fakes`, which is found through the line above.
from week.clients import ANSWERED, FAILED, GIVEN_UP, REFUSED
from week.simulated import DAY_S, Outcome, Settings, simulate

POLICIES = ("prefix", "least-tokens", "session")
WEEK_H = 168.0
EVENNESS, MIB, OBJECTS = 0.1, 1.0, 5000.0
"""Growth in a week that counts as none."""


def main() -> None:
    """Run all policies and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=OURS)
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--requests", type=int, default=50, help="in a burst, on average")
    parser.add_argument("--replicas", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, too")
    options = parser.parse_args()
    # Each loss of a replica is a line.
    logging.disable(logging.CRITICAL)
    settings = Settings(options.days, options.requests, options.replicas, seed=options.seed)
    outcomes: dict[str, Outcome] = {}
    for name in options.policies:
        began = time.process_time()
        outcomes[name] = simulate(build(name, options.seed), name, settings)  # type: ignore[arg-type]
        print(f"{name}: {time.process_time() - began:.0f} s of processor time", flush=True)
    text = "\n\n".join([_requests(outcomes), _faults(outcomes), _drift(outcomes)]) + "\n"
    print(text)
    if options.markdown is not None:
        options.markdown.write_text(text)
    sys.exit(0 if all(map(is_sound, outcomes.values())) else 1)


def is_sound(outcome: Outcome) -> bool:
    """Whether every request ended as it must, nothing was left at a rest, and nothing grows over a week."""
    ended = outcome.ends.total() == outcome.sent and not outcome.ends[FAILED] and not outcome.wrong
    return ended and not outcome.left and not any(verdict == "grows" for *_, verdict in drifts(outcome))


def drifts(outcome: Outcome) -> list[tuple[str, float, float, Trend, str]]:
    """What is looked at over time: its name, its means over the first and the last day, its trend, and a verdict."""
    return [
        ("variation of requests in flight", *_by_hour(outcome.hours, outcome.in_flight, EVENNESS)),
        ("variation of requests sent", *_by_hour(outcome.hours, outcome.dispatched, EVENNESS)),
        ("tables, MiB", *_ends(outcome.sized, outcome.mib, MIB)),
        ("objects", *_ends(outcome.sized, outcome.objects, OBJECTS)),
    ]


def _by_hour(hours: Sequence[float], values: Sequence[float], allowed: float) -> tuple[float, float, Trend, str]:
    """Of the means of each hour, since single bursts differ much."""
    by_hour: dict[int, list[float]] = {}
    for hour, value in zip(hours, values, strict=True):
        if value >= 0:
            by_hour.setdefault(int(hour), []).append(value)
    return _ends(list(by_hour), [statistics.mean(each) for each in by_hour.values()], allowed)


def _ends(hours: Sequence[float], values: Sequence[float], allowed: float) -> tuple[float, float, Trend, str]:
    found, day = trend(hours, values), DAY_S / 3600
    first = [value for hour, value in zip(hours, values, strict=True) if hour < day]
    last = [value for hour, value in zip(hours, values, strict=True) if hour >= hours[-1] - day]
    return statistics.mean(first), statistics.mean(last), found, found.verdict(allowed / WEEK_H)


def _requests(outcomes: dict[str, Outcome]) -> str:
    lines = [
        "| policy | sent | answered | given up | refused, no replica | failed | lost | wrong | moves | rests | left |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---|",
    ]
    for name, outcome in outcomes.items():
        ends = [outcome.ends[end] for end in (ANSWERED, GIVEN_UP, REFUSED, FAILED)]
        left = ", ".join(f"{where}: {amount:g}" for where, amount in outcome.left.items()) or "nothing"
        lost = outcome.sent - outcome.ends.total()
        numbers = [outcome.sent, *ends, lost, outcome.wrong, outcome.moves, outcome.rests]
        lines.append(f"| {name} | {' | '.join(f'{number:,}' for number in numbers)} | {left} |")
    examples = [f"- {name}: `{example}`" for name, outcome in outcomes.items() for example in outcome.examples]
    return "\n".join([*lines, *([""] if examples else []), *examples])


def _faults(outcomes: dict[str, Outcome]) -> str:
    names = {what: None for outcome in outcomes.values() for what in sorted(outcome.happened)}
    lines = [f"| what happened | {' | '.join(outcomes)} |", "|---|" + "---:|" * len(outcomes)]
    for what in names:
        lines.append(f"| {what} | {' | '.join(str(outcome.happened[what]) for outcome in outcomes.values())} |")
    return "\n".join(lines)


def _drift(outcomes: dict[str, Outcome]) -> str:
    lines = [
        "| policy | what | first day | last day | slope in a week | 95% | verdict |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for name, outcome in outcomes.items():
        for what, first, last, found, verdict in drifts(outcome):
            slope, low, high = (WEEK_H * each for each in (found.slope, found.low, found.high))
            row = [name, what, f"{first:.3f}", f"{last:.3f}", f"{slope:+.3f}", f"{low:+.3f} to {high:+.3f}", verdict]
            lines.append(f"| {' | '.join(row)} |")
        days = [[1000 * wait for wait in waits] for waits in outcome.waits if waits]
        for share in (0.5, 0.99):
            first, last = percentile(days[0], share), percentile(days[-1], share)
            lines.append(f"| {name} | ms to the first token, p{100 * share:.0f} | {first:.1f} | {last:.1f} | | | |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
