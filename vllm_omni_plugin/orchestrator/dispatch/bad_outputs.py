"""Replicas of which AsyncLLM's side could not process an output, and which of them are distrusted for it."""

from collections.abc import Callable, Sequence

from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember, stage_and_replica
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import OutputUnusable

logger = init_logger(__name__)

REMEMBERED_S = 600.0
"""Seconds for which the bad output of one replica speaks for the others."""


class BadOutputs:
    """Tells a broken replica from a request whose outputs cannot be processed wherever it runs.

    A replica that sends such outputs alone is taken for broken. Once another one has sent them, too, the requests or
    the server's own code are to blame, and nobody is distrusted until that was `REMEMBERED_S` ago. So a client who
    sends such a request again and again keeps one replica from serving at most.

    Args:
        stage_pools: the pools by stage.
        clock: monotonic seconds.
        distrust: takes a replica out, for a reason.
    """

    def __init__(
        self,
        stage_pools: Sequence[StagePool],
        clock: Callable[[], float],
        distrust: Callable[[PoolMember, str], None],
    ) -> None:
        self._pools = stage_pools
        self._clock = clock
        self._distrust = distrust
        # By the replica's name, when its last one was.
        self._last: dict[str, float] = {}

    def handle(self, message: OutputUnusable) -> None:
        """There was one."""
        stage_id, replica_id = stage_and_replica(message.engine_index)
        pool = self._pools[stage_id]
        member = next((member for member in pool.members if member.replica_id == replica_id), None)
        if member is None or member.client is None:
            # It was lost while this was on its way.
            return
        reason = f"an output of it, of request {message.request_id}, could not be processed: {message.reason}"
        why_trusted = self._why_trusted(pool, member)
        if why_trusted:
            logger.error("Replica %d of stage %d serves on, since %s (%s).", replica_id, stage_id, why_trusted, reason)
        else:
            self._distrust(member, reason)

    def _why_trusted(self, pool: StagePool, member: PoolMember) -> str:
        """Why a replica that has sent one is trusted all the same; "" if it is not."""
        now = self._clock()
        self._last = {name: at for name, at in self._last.items() if now - at < REMEMBERED_S}
        others = sorted(self._last.keys() - {member.name})
        self._last[member.name] = now
        if others:
            return f"the same came from {', '.join(others)} lately, so that requests may be to blame"
        if pool.lockstep:
            return "the other ranks of its group would end with it"
        if all(other is member for other in pool.serving):
            return "no other one serves"
        return ""
