"""Requests that belong together: where the first of them went, the others find what it has left there."""

from collections import OrderedDict

from vllm_omni_plugin.errors import RequestLostError
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger

MAX_BINDINGS = 16_384
"""Keys that are remembered, the latest ones: what belongs together is sent within moments."""


class AffinityBindings:
    """The replica of each affinity key, while its engine is the one that it had then."""

    def __init__(self) -> None:
        # Every engine of a replica has an ledger of its own.
        self._bindings: OrderedDict[int, tuple[PoolMember, LoadLedger]] = OrderedDict()

    def bind(self, key: int, member: PoolMember) -> None:
        """The first request of a key goes to this replica; those that follow find there what it leaves."""
        self._bindings[key] = member, member.ledger
        self._bindings.move_to_end(key)
        if len(self._bindings) > MAX_BINDINGS:
            self._bindings.popitem(last=False)

    def replica_of(self, key: int) -> PoolMember | None:
        """The replica of a key, None if it is not known.

        Raises:
            RequestLostError: it was lost since.
        """
        if key not in self._bindings:
            return None
        member, ledger = self._bindings[key]
        if member.ledger is not ledger:
            raise RequestLostError(
                f"Replica {member.replica_id} was lost, and with it what an earlier request had left there for this "
                "one. Please send both again."
            )
        return member
