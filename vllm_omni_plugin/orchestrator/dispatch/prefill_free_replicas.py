"""Which replicas are left without prompts of requests that leave room for others."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from vllm_omni_plugin.orchestrator.pool.send_window import SendWindow
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger

GROUP = 8
"""Replicas of which one is left clear. In a smaller fleet one is a larger part than what it brings is worth."""
CLEAR_S = 1.0
"""How long one is left clear at most, while no other of its group is: then it is another one's turn."""


class _Replica(Protocol):
    @property
    def replica_id(self) -> int: ...

    @property
    def ledger(self) -> LoadLedger: ...


R = TypeVar("R", bound=_Replica)


class PrefillFreeReplicas:
    """Groups of 8 to 15 replicas, or all of a smaller fleet. Each operation looks at one group.

    A replica is clear if it could begin a prompt with its next step, as far as this head has sent it some. Without
    care a flood has a prompt in every engine's step, and whoever need not leave room waits for the end of one.

    Args:
        send_window: when a replica has a free slot.
        clock: monotonic seconds.
    """

    def __init__(self, send_window: SendWindow, clock: Callable[[], float]) -> None:
        self._send_window = send_window
        self._clock = clock
        self._turn = 0

    def next_group(self, serving: Sequence[R]) -> Sequence[R]:
        """The replicas of a group, of another one at each call.

        Args:
            serving: those that serve, in order of their ids; there must be one.
        """
        self._turn += 1
        return _group(serving, self._turn % _groups(serving))

    def must_stay_free(self, replica: R, serving: Sequence[R]) -> bool:
        """Whether a replica gets no prompt that leaves room, since it is the last clear one of its group.

        One that idles gets it at any rate, and so does one that would be heard of only when somebody goes on with a
        session: nobody would ask again.
        """
        ledger = replica.ledger
        if len(serving) < GROUP or ledger.pending or not ledger.outputs_every_step:
            return False
        place = bisect_left(serving, replica.replica_id, key=lambda each: each.replica_id)
        group = _group(serving, place * _groups(serving) // len(serving))
        if any(self._is_clear(each.ledger) for each in group if each is not replica):
            ledger.prefill_free_since = None
            return False
        if ledger.prefill_free_since is None:
            ledger.prefill_free_since = self._clock()
        return self._clock() - ledger.prefill_free_since < CLEAR_S

    def _is_clear(self, ledger: LoadLedger) -> bool:
        return not ledger.pending and self._send_window.has_free_slot(ledger)


def _groups(serving: Sequence[R]) -> int:
    return max(1, len(serving) // GROUP)


def _group(serving: Sequence[R], number: int) -> Sequence[R]:
    groups, count = _groups(serving), len(serving)
    # The first place of a group is the first that `place * groups // count` maps to it.
    return serving[-(-number * count // groups) : -(-(number + 1) * count // groups)]
