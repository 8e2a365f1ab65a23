"""By which number each replica of a stage is known to all heads."""

from collections.abc import Iterable, Mapping

from vllm_omni_plugin.coordinator.protocol.control_messages import ReplicaKey
from vllm_omni_plugin.coordinator.protocol.head_messages import ReplicaNumber
from vllm_omni_plugin.coordinator.state.membership_table import DEFAULT_MAX_REPLICAS


class Numbering:
    """Gives each replica the lowest free number of its stage, and keeps it until it is released.

    Args:
        first: the lowest of a stage, by its id, where it is not 0.
    """

    def __init__(self, first: Mapping[int, int] | None = None) -> None:
        self._first = dict(first or {})
        self._numbers: dict[ReplicaKey, int] = {}
        self._former: dict[ReplicaKey, int] = {}
        self._taken: dict[int, set[int]] = {}
        self._lowest: dict[int, int] = {}

    def number_of(self, key: ReplicaKey) -> int:
        """Return the number of a replica, which has one from now on."""
        number = self._numbers.get(key)
        if number is None:
            former = self._former.pop(key, None)
            number = self._numbers[key] = self._take_lowest(key.stage_id) if former is None else former
        return number

    def reserve(self, numbers: Iterable[ReplicaNumber]) -> None:
        """Keep the numbers that replicas had, for when they are asked for. What is taken or known already stays so."""
        for row in numbers:
            key = ReplicaKey.of(row)
            taken = self._taken.setdefault(row.stage_id, set())
            known = key in self._numbers or key in self._former or row.replica_id in taken
            allowed = row.replica_id >= self._first.get(row.stage_id, 0)
            if allowed and not known and len(self._former) < DEFAULT_MAX_REPLICAS:
                self._former[key] = row.replica_id
                taken.add(row.replica_id)

    def end_reservations(self) -> None:
        """Free the numbers that nobody has asked for."""
        for key, number in self._former.items():
            self._free(key.stage_id, number)
        self._former.clear()

    def release(self, key: ReplicaKey) -> None:
        """Free the number of a replica, if it has one."""
        number = self._numbers.pop(key, None)
        if number is not None:
            self._free(key.stage_id, number)

    def _take_lowest(self, stage_id: int) -> int:
        taken = self._taken.setdefault(stage_id, set())
        number = self._lowest_of(stage_id)
        while number in taken:
            number += 1
        taken.add(number)
        self._lowest[stage_id] = number + 1
        return number

    def _free(self, stage_id: int, number: int) -> None:
        self._taken[stage_id].remove(number)
        self._lowest[stage_id] = min(number, self._lowest_of(stage_id))

    def _lowest_of(self, stage_id: int) -> int:
        """A number below which all are taken."""
        return self._lowest.get(stage_id, self._first.get(stage_id, 0))
