"""Headroom: what requests over their share leave free for requests within theirs."""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from vllm_omni_plugin.admission import HeadroomSize
from vllm_omni_plugin.orchestrator.pool.send_window import SendWindow, has_free_slot
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun

GROUP_SIZE = 8
"""Replicas of a group at least, unless the fleet is smaller."""
SMALLEST_FLEET = {HeadroomSize.NORMAL: GROUP_SIZE, HeadroomSize.LARGE: 2}
"""Replicas of a fleet that keeps one prefill-free. In a small fleet this costs so much throughput that it is off by
default."""
MAX_PREFILL_FREE_S = 1.0
"""Seconds for which a replica is kept free of prefills at most, while no other replica of its group is free."""


class _Replica(Protocol):
    @property
    def replica_id(self) -> int: ...

    @property
    def ledger(self) -> LoadLedger: ...


R = TypeVar("R", bound=_Replica)
R_co = TypeVar("R_co", bound=_Replica, covariant=True)


class _Pool(Protocol[R_co]):
    @property
    def serving(self) -> Sequence[R_co]:
        """The replicas that serve, in order of their ids."""


class Headroom(Generic[R]):
    """Decides which replica has room for a request, and keeps headroom of the fleet.

    A request is *over its share* if `Admission.is_over_share` says so, and otherwise *within its share*. At each
    replica `SendWindow` leaves headroom. In addition one replica of each group is kept free of prefills of over-share
    requests: otherwise each engine may be in the middle of one, and a request within its share has to wait for its end.
    A group has 8 to 15 replicas. A smaller fleet is one group, and keeps a replica free only with large headroom.
    Each operation looks at one group.

    Args:
        is_over_share: whether a run is over its share.
        size: how much headroom such a run leaves. It may change while the run waits.
    """

    def __init__(
        self,
        pool: _Pool[R],
        send_window: SendWindow,
        is_over_share: Callable[[StageRun], bool],
        size: Callable[[], HeadroomSize],
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._send_window = send_window
        self._is_over_share = is_over_share
        self._size = size
        self._clock = clock
        self._turn = 0

    def has_room(self, run: StageRun, replica: R, prefill_tokens: int) -> bool:
        """Whether a run may be sent to a replica now, which has to compute so many tokens of its prompt."""
        ledger = replica.ledger
        if not self._is_over_share(run):
            return self._send_window.has_room(ledger, prefill_tokens)
        newest = ledger.newest_pending
        in_front = newest is not None and not self._is_over_share(newest)
        size = self._size()
        if not self._send_window.has_room(ledger, prefill_tokens, size, in_front):
            return False
        return not self._stays_prefill_free(replica, size)

    def least_loaded(self, chosen: R, may_start: Callable[[R], bool]) -> R:
        """The replica where a request within its share waits for the fewest prompt tokens.

        Compares the policy's choice, which wins ties, with the replicas of one group. Each call takes the next group.
        """
        self._turn += 1
        serving = self._pool.serving
        group = _group(serving, self._turn % _groups(serving))
        candidates = (each for each in (chosen, *group) if has_free_slot(each.ledger))
        startable = (each for each in candidates if may_start(each))
        return min(startable, key=lambda each: each.ledger.prefill_tokens_ahead, default=chosen)

    def _stays_prefill_free(self, replica: R, size: HeadroomSize) -> bool:
        """Whether a replica gets no over-share prefill, since it is the last prefill-free replica of its group."""
        ledger, serving = replica.ledger, self._pool.serving
        # An idle replica gets a prefill. So does a replica from which no output is certain to come: only outputs cause
        # this question to be asked again.
        if len(serving) < SMALLEST_FLEET[size] or ledger.pending or not ledger.outputs_every_step:
            return False
        place = bisect_left(serving, replica.replica_id, key=lambda each: each.replica_id)
        group = _group(serving, place * _groups(serving) // len(serving))
        if any(self._is_prefill_free(each.ledger) for each in group if each is not replica):
            ledger.prefill_free_since = None
            return False
        if ledger.prefill_free_since is None:
            ledger.prefill_free_since = self._clock()
        return self._clock() - ledger.prefill_free_since < MAX_PREFILL_FREE_S

    def _is_prefill_free(self, ledger: LoadLedger) -> bool:
        """Whether a replica could begin a prefill with its next step, as far as this head's own requests tell."""
        return not ledger.pending and has_free_slot(ledger)


def _groups(serving: Sequence[R]) -> int:
    return max(1, len(serving) // GROUP_SIZE)


def _group(serving: Sequence[R], number: int) -> Sequence[R]:
    groups, count = _groups(serving), len(serving)
    # The first place of a group is the first that `place * groups // count` maps to it.
    return serving[-(-number * count // groups) : -(-(number + 1) * count // groups)]
