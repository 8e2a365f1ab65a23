"""What a soak came to: accounts, the load's evenness, and a trend of all that processes hold."""

import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from mixed_traffic import Accounts, End
from trends import ENOUGH, Trend, trend

ALLOWED = {"memory_mib": 8.0, "shared_mib": 1.0, "objects": 2000.0, "in-flight variation": 0.1}
"""Growth per hour that counts as none. Of all else, which is counted piece by piece, half a piece."""
_ALLOWED_PIECES = 0.5
UNSOUND, UNCLEAR = 1, 3
"""Exit codes."""


class Look(NamedTuple):
    """What was held at rest.

    Attributes:
        hours: since the beginning.
        held: what, by whom and in which family.
    """

    hours: float
    held: dict[tuple[str, str], float]


class Round(NamedTuple):
    """One round.

    Attributes:
        number: from 1.
        fault: what happened in it.
        rate: requests per second.
        variation: coefficient of variation of requests in flight over the replicas that served, mean of all looks.
        in_flight: requests that the head had when no client waited for one any more.
        look: at its end.
    """

    number: int
    fault: str
    rate: float
    variation: float
    in_flight: int
    look: Look

    def __str__(self) -> str:
        memory = self.look.held["head", "memory_mib"]
        return (
            f"round {self.number} ({self.fault}): {self.rate:.1f} requests/s, variation {self.variation:.2f}, "
            f"head {memory:.1f} MiB at rest, {self.in_flight} in flight"
        )


@dataclass
class Soak:
    """A whole run.

    Attributes:
        accounts: of all requests.
        happened: how often each fault did.
        rounds: that have ended.
        left_behind: files in the temporary folder after the end of all processes.
        shared_before: names of the user's files in /dev/shm before the first process.
        shared_after: of those after the end of all processes.
    """

    accounts: Accounts
    happened: Counter[str]
    rounds: list[Round] = field(default_factory=list)
    left_behind: int = 0
    shared_before: set[str] = field(default_factory=set)
    shared_after: set[str] = field(default_factory=set)

    def add(self, fault: str, rate: float, variations: list[float], in_flight: int, look: Look) -> None:
        """A round has ended."""
        # Without any load, there is none that is uneven.
        variation = statistics.mean(variations or [0.0])
        self.rounds.append(Round(len(self.rounds) + 1, fault, rate, variation, in_flight, look))

    @property
    def exit_code(self) -> int:
        """0 if all requests ended as they should, nothing grows and nothing is left; 1 if not; 3 if it is unclear."""
        idle = not any(each.in_flight for each in self.rounds)
        left = self.left_behind or self.shared_after - self.shared_before
        if len(self.rounds) < ENOUGH:
            verdicts = {"unclear"}
        else:
            verdicts = {found.verdict(allowed(family)) for _, family, found in self.trends()}
        if not self.accounts.is_balanced or not idle or left or "grows" in verdicts:
            return UNSOUND
        return UNCLEAR if "unclear" in verdicts else 0

    def trends(self) -> Iterator[tuple[str, str, Trend]]:
        """By whom and of what, for all that was looked at."""
        hours = [each.look.hours for each in self.rounds]
        yield "all", "in-flight variation", trend(hours, [each.variation for each in self.rounds])
        for who, family in self.rounds[0].look.held:
            yield who, family, trend(hours, [each.look.held[who, family] for each in self.rounds])


def allowed(family: str) -> float:
    """Growth per hour that counts as none."""
    return ALLOWED.get(family, _ALLOWED_PIECES)


def report(soak: Soak) -> str:
    """The tables in Markdown."""
    if len(soak.rounds) < ENOUGH:
        return f"{_accounts(soak.accounts)}\n\nOnly {len(soak.rounds)} rounds: too few for trends.\n"
    return "\n\n".join([_accounts(soak.accounts), _summary(soak), _trends(soak)]) + "\n"


def _accounts(accounts: Accounts) -> str:
    ends = [end.value for end in End]
    lines = [f"| requests | sent | {' | '.join(ends)} |", "|---|" + "---:|" * (len(ends) + 1)]
    for kind, sent in accounts.sent.items():
        counts = [str(accounts.ends[kind, end]) for end in End]
        lines.append(f"| {kind} | {sent} | {' | '.join(counts)} |")
    totals = [str(accounts.total(end)) for end in End]
    lines.append(f"| all | {accounts.sent.total()} | {' | '.join(totals)} |")
    return "\n".join(lines)


def _summary(soak: Soak) -> str:
    accounts, in_flight = soak.accounts, max(each.in_flight for each in soak.rounds)
    faults = ", ".join(f"{name} {count}" for name, count in soak.happened.items())
    hours = soak.rounds[-1].look.hours
    lines = [
        f"- {len(soak.rounds)} rounds in {60 * hours:.1f} min: {faults}.",
        f"- Lost in all: {accounts.lost}; wrong answers: {accounts.wrong}.",
        f"- Refused though they could be answered: {accounts.turned_away}.",
        f"- In flight at rest: {in_flight} at most. Temporary files after the end: {soak.left_behind}.",
        f"- In /dev/shm: {len(soak.shared_before)} before, {len(soak.shared_after)} after the end, "
        f"{len(soak.shared_after - soak.shared_before)} of them new.",
        *(f"- Example: `{example}`" for example in accounts.examples),
    ]
    return "\n".join(lines)


def _trends(soak: Soak) -> str:
    lines = [
        "| of | what | first third | last third | slope per hour | 95% | verdict |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for who, family, found in soak.trends():
        row = [who, family.replace("_mib", ", MiB"), f"{found.first:.2f}", f"{found.last:.2f}", f"{found.slope:+.2f}"]
        row += [f"{found.low:+.2f} to {found.high:+.2f}", found.verdict(allowed(family))]
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)
