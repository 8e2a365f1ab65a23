"""What a head knows from the coordinator: whether it has missed anything, the list, and who else is there. Pure."""

from collections.abc import Iterator, Sequence

from vllm_omni_plugin.coordinator.deliveries import (
    Answered,
    CallSent,
    Delivery,
    FullList,
    HeadLeft,
    ListDelta,
    NumbersWanted,
    PeerWork,
    Refused,
    Seated,
    ToHead,
    WorkWanted,
)
from vllm_omni_plugin.coordinator.head_messages import PeerCall, ReplicaNumber
from vllm_omni_plugin.coordinator.membership import ReplicaKey
from vllm_omni_plugin.coordinator.messages import ReplicaInfo, ReplicaList

Notice = ReplicaList | PeerWork | HeadLeft | PeerCall | WorkWanted | NumbersWanted | CallSent | Answered | Refused
"""What a delivery says to a head."""


class HeadView:
    """Takes deliveries in, in order of arrival.

    Attributes:
        in_step: Whether nothing is missing. If something is, only calls and their answers count until everything is
            told anew.
    """

    def __init__(self) -> None:
        self.in_step = False
        self._epoch = 0
        self._sequence = 0
        self._heads: set[str] = set()
        self._version = 0
        self._takes_work: dict[ReplicaKey, ReplicaInfo] = {}
        self._held_back: dict[ReplicaKey, ReplicaInfo] = {}

    def take(self, delivery: Delivery, messages: Sequence[ToHead]) -> list[Notice]:
        """Take a delivery in; return what it says. ``messages``: its own, without those that are not valid."""
        follows = delivery.epoch == self._epoch and delivery.sequence == self._sequence + 1
        anew = bool(messages) and isinstance(messages[0], Seated)
        self.in_step = anew or (self.in_step and follows)
        if anew and delivery.epoch != self._epoch:
            self._epoch = delivery.epoch
            self._version = 0
        self._sequence = delivery.sequence
        if len(messages) != len(delivery.messages):
            self.in_step = False
        return [notice for message in messages for notice in self._heed(message)]

    def lose(self) -> None:
        """Count on nothing that was not told since: the coordinator is silent."""
        self.in_step = False
        self._heads.clear()

    def numbers(self) -> list[ReplicaNumber]:
        """Return the numbers of the replicas in the last list."""
        rows = [*self._takes_work.items(), *self._held_back.items()]
        return [ReplicaNumber(*key, row.replica_id) for key, row in rows if row.replica_id >= 0]

    def _heed(self, message: ToHead) -> Iterator[Notice]:
        match message:
            case PeerCall() | CallSent() | Answered() | WorkWanted() | NumbersWanted() | Refused():
                yield message
            case _ if not self.in_step:
                return
            case Seated():
                yield from [HeadLeft(head_id) for head_id in self._heads.difference(message.heads)]
                self._heads = set(message.heads)
            case PeerWork():
                self._heads.add(message.head_id)
                yield message
            case HeadLeft():
                self._heads.discard(message.head_id)
                yield message
            case FullList() | ListDelta():
                yield from self._take_list(message)

    def _take_list(self, edition: FullList | ListDelta) -> Iterator[ReplicaList]:
        if isinstance(edition, FullList):
            self._takes_work.clear()
            self._held_back.clear()
        elif edition.version != self._version + 1:
            self.in_step = False
            return
        else:
            for key in edition.removed:
                self._forget(ReplicaKey(*key))
        self._version = edition.version
        for rows, told in ((self._takes_work, edition.replicas), (self._held_back, edition.no_new_work)):
            for row in told:
                key = ReplicaKey(row.stage_id, row.input_addr, row.output_addr)
                self._forget(key)
                rows[key] = row
        yield ReplicaList(list(self._takes_work.values()), edition.timestamp, list(self._held_back.values()))

    def _forget(self, key: ReplicaKey) -> None:
        self._takes_work.pop(key, None)
        self._held_back.pop(key, None)
