"""Affinity: requests with the same key go to the same replica, which keeps state of the first of them."""

from collections import OrderedDict

from vllm_omni_plugin.errors import RequestLostError
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger

MAX_BINDINGS = 16_384
"""Keys that are kept, the latest ones: requests that belong together come within moments."""


class AffinityBindings:
    """The replica of each affinity key, and the engine that the replica had then."""

    def __init__(self) -> None:
        # Each start of an engine has a ledger of its own.
        self._bindings: OrderedDict[int, tuple[PoolMember, LoadLedger]] = OrderedDict()

    def bind(self, key: int, member: PoolMember) -> None:
        self._bindings[key] = member, member.ledger
        self._bindings.move_to_end(key)
        if len(self._bindings) > MAX_BINDINGS:
            self._bindings.popitem(last=False)

    def replica_of(self, key: int) -> PoolMember | None:
        """The replica of a key; None if the key is not known. Raises RequestLostError if the replica was lost since."""
        if key not in self._bindings:
            return None
        member, ledger = self._bindings[key]
        if member.ledger is not ledger:
            raise RequestLostError(
                f"Replica {member.replica_id} was lost, and with it what an earlier request had left there for this "
                "one. Please send both again."
            )
        return member
