"""Where requests that belong together went, for those that need what the first of them left at its replica."""

from collections import OrderedDict

from vllm_omni_plugin.errors import RequestLostError
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember
from vllm_omni_plugin.orchestrator.requests.charges import Account

MAX_HOMES = 16_384
"""Keys that are remembered, the latest ones: what belongs together is sent within moments."""


class Homes:
    """The replica of each key, as long as it lives the life that it lived then."""

    def __init__(self) -> None:
        # Every life of a replica has an account of its own.
        self._homes: OrderedDict[int, tuple[PoolMember, Account]] = OrderedDict()

    def note(self, key: int, member: PoolMember) -> None:
        """The first request of a key goes to this replica; those that follow find there what it leaves."""
        self._homes[key] = member, member.account
        self._homes.move_to_end(key)
        if len(self._homes) > MAX_HOMES:
            self._homes.popitem(last=False)

    def of(self, key: int) -> PoolMember | None:
        """The replica of a key, None if it is not known.

        Raises:
            RequestLostError: it was lost since.
        """
        if key not in self._homes:
            return None
        member, account = self._homes[key]
        if member.account is not account:
            raise RequestLostError(
                f"Replica {member.replica_id} was lost, and with it what an earlier request had left there for this "
                "one. Please send both again."
            )
        return member
