"""Numbers and ids that replicas keep over their restarts."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaEvent, ReplicaKey
from vllm_omni_plugin.coordinator.state.membership_table import Change, Liveness

_FLEET = 0
# Nodes ask for numbers minutes before their replicas register.
_LEAST_REMEMBERED = 1024
# Ids stay low even if all nodes that join have new host slots.
_LEAST_REMEMBERED_IDS = 64

_Name = str | ReplicaKey
_Scoped = tuple[int, _Name]


class NumberBook:
    """Gives each name the lowest free number of its scope, and remembers the numbers of absent names.

    The name of a replica is its host slot. Without one, or if a present replica has the same, its key is its name. A
    name is present from `claim` to `release`. Of the absent names, the last ``least_remembered`` are remembered, or as
    many as were ever present at once if that is more. ``first``: by scope, the lowest number to give, if not 0.
    """

    def __init__(self, first: Mapping[int, int], least_remembered: int) -> None:
        self._first = dict(first)
        self._remembered = least_remembered
        self._numbers: dict[_Scoped, int] = {}
        self._names: dict[tuple[int, int], _Name] = {}
        # By scope: all lower numbers are taken.
        self._taken_below = defaultdict(int, first)
        # Oldest first.
        self._absent: dict[_Scoped, None] = {}
        self._holders: dict[_Scoped, ReplicaKey] = {}
        self._claimed: dict[ReplicaKey, _Scoped] = {}

    def prepare(self, scope: int, name: _Name) -> int:
        """Return the number of a name, which a replica will claim later."""
        scoped = scope, name
        if scoped not in self._numbers:
            self._give(scoped, self._lowest_free(scope))
        if scoped not in self._holders:
            self._set_absent(scoped)
        return self._numbers[scoped]

    def claim(self, scope: int, key: ReplicaKey, host_slot: str, wanted: int) -> int:
        """Return the number of a present replica: ``wanted`` unless that is below ``first`` or of another one."""
        scoped = self._name_of(scope, key, host_slot)
        if self._claimed.get(key, scoped) != scoped:
            self.release(key)
        is_free = wanted >= self._first.get(scope, 0) and not self._is_present(scope, wanted)
        if is_free and self._numbers.get(scoped) != wanted:
            if (former := self._names.get((scope, wanted))) is not None:
                self._forget((scope, former))
            self._forget(scoped)
            self._give(scoped, wanted)
        elif scoped not in self._numbers:
            self._give(scoped, self._lowest_free(scope))
        self._absent.pop(scoped, None)
        self._holders[scoped], self._claimed[key] = key, scoped
        self._remembered = max(self._remembered, len(self._holders))
        return self._numbers[scoped]

    def release(self, key: ReplicaKey) -> None:
        """A replica is gone. Its number is remembered."""
        scoped = self._claimed.pop(key, None)
        if scoped is not None:
            del self._holders[scoped]
            self._set_absent(scoped)

    def knows(self, scope: int, key: ReplicaKey, host_slot: str) -> bool:
        """Whether a replica, present or not, has a number."""
        return self._name_of(scope, key, host_slot) in self._numbers

    def number_of(self, key: ReplicaKey) -> int | None:
        scoped = self._claimed.get(key)
        return None if scoped is None else self._numbers[scoped]

    def _name_of(self, scope: int, key: ReplicaKey, host_slot: str) -> _Scoped:
        scoped: _Scoped = scope, host_slot or key
        return scoped if self._holders.get(scoped, key) == key else (scope, key)

    def _is_present(self, scope: int, number: int) -> bool:
        name = self._names.get((scope, number))
        return name is not None and (scope, name) in self._holders

    def _set_absent(self, scoped: _Scoped) -> None:
        self._absent.pop(scoped, None)
        self._absent[scoped] = None
        while len(self._absent) > self._remembered:
            self._forget(next(iter(self._absent)))

    def _give(self, scoped: _Scoped, number: int) -> None:
        self._numbers[scoped] = number
        self._names[scoped[0], number] = scoped[1]

    def _forget(self, scoped: _Scoped) -> None:
        self._absent.pop(scoped, None)
        number = self._numbers.pop(scoped, None)
        if number is not None:
            del self._names[scoped[0], number]
            self._taken_below[scoped[0]] = min(self._taken_below[scoped[0]], number)

    def _lowest_free(self, scope: int) -> int:
        while (scope, self._taken_below[scope]) in self._names:
            self._taken_below[scope] += 1
        return self._taken_below[scope]


class ReplicaNumbers:
    """The numbers of all replicas of the fleet. ``reserved``: the numbers below it are the head's own engines."""

    def __init__(self, reserved: int) -> None:
        self._book = NumberBook({_FLEET: reserved}, _LEAST_REMEMBERED)

    def for_host_slots(self, host_slots: Iterable[str]) -> tuple[int, ...]:
        return tuple([self._book.prepare(_FLEET, host_slot) for host_slot in host_slots])

    def record(self, changes: Iterable[Change]) -> list[ReplicaEvent]:
        """Record the numbers that replicas announce. Returns those whose number another one has, each name once."""
        conflicts = []
        for change in changes:
            event = change.member.event
            key = ReplicaKey.of(event)
            if change.member.liveness in (Liveness.DEAD, Liveness.LEFT):
                self._book.release(key)
            elif change.alters_list and event.number >= 0:
                is_new = not self._book.knows(_FLEET, key, event.host_slot)
                if self._book.claim(_FLEET, key, event.host_slot, event.number) != event.number and is_new:
                    conflicts.append(event)
        return conflicts


class ReplicaIds:
    """The ids of replicas in their stages, kept while present. ``first``: by stage, the lowest id, where not 0."""

    def __init__(self, first: Mapping[int, int] | None = None) -> None:
        self._first = dict(first or {})
        self._book = NumberBook(self._first, _LEAST_REMEMBERED_IDS)

    def record(self, change: Change) -> None:
        """Take over the id that a replica had at a former coordinator, if it is free; free that of one that left."""
        event = change.member.event
        if change.member.liveness in (Liveness.DEAD, Liveness.LEFT):
            self._book.release(ReplicaKey.of(event))
        elif event.replica_id >= self._first.get(event.stage_id, 0):
            self._id(event, event.replica_id)

    def id_of(self, event: ReplicaEvent) -> int:
        """Return the id of a present replica. Assigns one if it has none."""
        return self._id(event, -1)

    def _id(self, event: ReplicaEvent, wanted: int) -> int:
        key = ReplicaKey.of(event)
        known = self._book.number_of(key)
        return self._book.claim(event.stage_id, key, event.host_slot, wanted) if known is None else known
