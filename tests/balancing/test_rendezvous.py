"""Sessions are spread evenly, and a change of membership moves no more of them than it must."""

from collections import Counter
from collections.abc import Iterable

import pytest

from vllm_omni_plugin.balancing.rendezvous import RendezvousTable

SESSIONS = [f"session-{number}".encode() for number in range(10_000)]


def names(numbers: Iterable[int]) -> list[bytes]:
    return [str(number).encode() for number in numbers]


def owners(table: RendezvousTable, members: list[bytes]) -> list[bytes]:
    table.update(members)
    return [members[table.position(session)] for session in SESSIONS]


def moved(before: list[bytes], after: list[bytes]) -> set[tuple[bytes, bytes]]:
    return {(left, right) for left, right in zip(before, after, strict=True) if left != right}


def share_moved(before: list[bytes], after: list[bytes]) -> float:
    return sum(map(bytes.__ne__, before, after)) / len(before)


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_sessions_are_spread_evenly(count: int) -> None:
    shares = Counter(owners(RendezvousTable(), names(range(count))))
    assert len(shares) == count
    assert max(shares.values()) / len(SESSIONS) < 1 / count + 0.02


@pytest.mark.parametrize("count", [1, 2, 3, 8, 64])
def test_a_joiner_takes_its_share_and_nothing_moves_between_others(count: int) -> None:
    table, members = RendezvousTable(), names(range(count + 1))
    before = owners(table, members[:-1])
    after = owners(table, members)
    assert share_moved(before, after) < 1 / (count + 1) + 0.02
    assert {to for _, to in moved(before, after)} == {members[-1]}


@pytest.mark.parametrize("count", [2, 3, 8, 64])
def test_a_leaver_gives_up_its_share_and_nothing_moves_between_others(count: int) -> None:
    table, members = RendezvousTable(), names(range(count))
    before = owners(table, members)
    after = owners(table, members[1:])
    assert share_moved(before, after) < 1 / count + 0.02
    assert {origin for origin, _ in moved(before, after)} == {members[0]}


def test_who_comes_back_gets_back_what_it_had() -> None:
    table, members = RendezvousTable(), names(range(5))
    before = owners(table, members)
    owners(table, members[:3])
    assert owners(table, members[::-1]) == before


@pytest.mark.parametrize("joiners", [1, 20])
def test_the_order_of_events_does_not_matter(joiners: int) -> None:
    table, members = RendezvousTable(), names(range(30))
    for end in range(1, len(members) + 1, joiners):
        owners(table, members[:end])
    assert owners(table, members) == owners(RendezvousTable(), members)


def test_other_attempts_lead_to_other_members() -> None:
    table, members = RendezvousTable(), names(range(8))
    table.update(members)
    seen = [{table.position(session, attempt) for attempt in range(16)} for session in SESSIONS[:100]]
    assert min(map(len, seen)) >= 4
