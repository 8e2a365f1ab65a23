"""The members of a pool by id. Ids are given lowest first, and those of members that have left are given again."""

import itertools
from collections import Counter

from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember

_MAX_DESCRIBED = 8
"""Members that a description names one by one."""


class PoolMembers:
    """Who belongs to one stage's pool.

    Args:
        stage_id: the stage.
    """

    def __init__(self, stage_id: int) -> None:
        self._stage_id = stage_id
        self._by_id: dict[int, PoolMember] = {}
        # Replaced, never changed, so that other threads may read it.
        self._all: tuple[PoolMember, ...] = ()

    @property
    def members(self) -> tuple[PoolMember, ...]:
        """All members, in order of their ids. Safe to read from any thread."""
        return self._all

    def get(self, replica_id: int) -> PoolMember | None:
        """The member with this id, None if there is none."""
        return self._by_id.get(replica_id)

    def add(self, replica_id: int | None) -> PoolMember:
        """A new member with this id, None for the lowest free one.

        Raises:
            ValueError: the id is taken.
        """
        if replica_id is None:
            replica_id = next(number for number in itertools.count() if number not in self._by_id)
        if replica_id in self._by_id:
            raise ValueError(f"stage {self._stage_id} has a replica {replica_id} already")
        member = PoolMember(replica_id, self._stage_id)
        self._by_id[replica_id] = member
        self._all = with_member(self._all, member)
        return member

    def remove(self, member: PoolMember) -> None:
        """Forget a member and free its id. Nothing to do if it was removed before."""
        if self._by_id.get(member.replica_id) is member:
            del self._by_id[member.replica_id]
            self._all = without_member(self._all, member)

    def describe(self) -> str:
        """In what state the members are, in words for the API's user."""
        if not self._all:
            return "it has none"
        if len(self._all) > _MAX_DESCRIBED:
            counts = Counter(m.status.value for m in self._all)
            return "of its replicas " + ", ".join(f"{count} are {status}" for status, count in sorted(counts.items()))
        return ", ".join(f"replica {m.replica_id} is {m.status.value}" for m in self._all)


def with_member(members: tuple[PoolMember, ...], member: PoolMember) -> tuple[PoolMember, ...]:
    """The members, and this one in its place."""
    return tuple(sorted((*members, member), key=lambda m: m.replica_id))


def without_member(members: tuple[PoolMember, ...], member: PoolMember) -> tuple[PoolMember, ...]:
    """The members but this one."""
    return tuple(m for m in members if m is not member)
