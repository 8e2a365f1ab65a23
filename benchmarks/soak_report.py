"""What a soak came to: accounts, the load's evenness, and a trend of all that processes hold."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from mixed_traffic import Accounts, End
from soak_evenness import Evenness
from trends import ENOUGH, Trend, trend

ALLOWED = {
    "memory_mib": 8.0,
    "shared_mib": 1.0,
    "objects": 2000.0,
    "variation of requests in flight": 0.1,
    "variation of requests sent": 0.1,
}
"""Growth per hour that counts as none. Of all else, which is counted piece by piece, half a piece."""
_ALLOWED_PIECES = 0.5
UNSOUND, UNCLEAR = 1, 3
"""Exit codes."""
_EXAMPLES = 5


class Look(NamedTuple):
    """What was held at rest.

    Attributes:
        hours: since the beginning.
        held: what, by whom and in which family.
        pids: of those who hold something, as far as they are processes.
    """

    hours: float
    held: dict[tuple[str, str], float]
    pids: Mapping[str, int] = {}


class Round(NamedTuple):
    """One round.

    Attributes:
        number: from 1.
        fault: what happened in it.
        rate: requests per second.
        in_flight: see `Evenness`.
        dispatched: likewise.
        counted: requests and tokens that the head had in its accounts when no client waited for anything any more.
        look: at its end.
    """

    number: int
    fault: str
    rate: float
    in_flight: float
    dispatched: float
    counted: float
    look: Look

    def __str__(self) -> str:
        memory = self.look.held["head", "memory_mib"]
        return (
            f"round {self.number} ({self.fault}): {self.rate:.1f} requests/s, variation {self.in_flight:.2f} in flight "
            f"and {self.dispatched:.2f} sent; head at rest {memory:.1f} MiB, {self.counted:.0f} counted"
        )


@dataclass
class Soak:
    """A whole run.

    Attributes:
        accounts: of all requests.
        happened: how often each fault did.
        rounds: that have ended.
        accepted: requests that the head has sent to replicas, two for a request for two answers.
        moves: of requests whose replica was lost.
        left_behind: what is in the temporary folder after the end of all processes.
        shared_before: names of the user's files in /dev/shm before the first process.
        shared_after: of those after the end of all processes.
    """

    accounts: Accounts
    happened: Counter[str]
    rounds: list[Round] = field(default_factory=list)
    accepted: float = 0.0
    moves: float = 0.0
    left_behind: list[str] = field(default_factory=list)
    shared_before: set[str] = field(default_factory=set)
    shared_after: set[str] = field(default_factory=set)

    def add(self, fault: str, rate: float, evenness: Evenness, counted: float, look: Look) -> None:
        """A round has ended."""
        number = len(self.rounds) + 1
        self.rounds.append(Round(number, fault, rate, evenness.in_flight, evenness.dispatched, counted, look))

    @property
    def agrees(self) -> bool:
        """Whether the head has accepted as many requests as clients know to be, each of which was answered or given up.

        A request that is given up while it moves goes nowhere, so that its move is one too many.
        """
        given_up = self.accounts.total(End.GIVEN_UP)
        return 0 <= self.accounts.answers + given_up - self.accepted <= given_up

    @property
    def exit_code(self) -> int:
        """0 if all requests ended as they should, nothing grows and nothing is left; 1 if not; 3 if it is unclear."""
        idle = not any(each.counted for each in self.rounds)
        left = self.left_behind or self.shared_after - self.shared_before
        if len(self.rounds) < ENOUGH:
            verdicts = {"unclear"}
        else:
            verdicts = {found.verdict(allowed(family)) for _, family, found in self.trends()}
        if not self.accounts.is_balanced or not self.agrees or not idle or left or "grows" in verdicts:
            return UNSOUND
        return UNCLEAR if "unclear" in verdicts else 0

    def trends(self) -> Iterator[tuple[str, str, Trend]]:
        """By whom and of what, for all that was looked at often enough; of a process since its last start."""
        hours = [each.look.hours for each in self.rounds]
        yield "all", "variation of requests in flight", trend(hours, [each.in_flight for each in self.rounds])
        yield "all", "variation of requests sent", trend(hours, [each.dispatched for each in self.rounds])
        last = self.rounds[-1].look
        for who, family in last.held:
            looks = [each.look for each in self.rounds if each.look.pids.get(who) == last.pids.get(who)]
            if len(looks) >= ENOUGH:
                yield who, family, trend([look.hours for look in looks], [look.held[who, family] for look in looks])


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
    accounts, counted = soak.accounts, max(each.counted for each in soak.rounds)
    faults = ", ".join(f"{name} {count}" for name, count in soak.happened.items())
    statuses = ", ".join(f"{status} {count}" for status, count in sorted(accounts.refusals.items()))
    hours = soak.rounds[-1].look.hours
    lines = [
        f"- {len(soak.rounds)} rounds in {60 * hours:.1f} min: {faults}. Requests that moved: {soak.moves:.0f}.",
        f"- Lost in all: {accounts.lost}; wrong answers: {accounts.wrong}.",
        f"- Refused with: {statuses or 'nothing'}. Refused though they could be answered: {accounts.turned_away}.",
        f"- Answers that clients got or gave up: {accounts.answers + accounts.total(End.GIVEN_UP)}; "
        f"requests that the head accepted for these: {soak.accepted:.0f}.",
        f"- Requests and tokens in the head's accounts at rest: {counted:.0f} at most. "
        f"Temporary files after the end: {len(soak.left_behind)}.",
        *(f"- Left behind: `{name}`" for name in soak.left_behind[:_EXAMPLES]),
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
