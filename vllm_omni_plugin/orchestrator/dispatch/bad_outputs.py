"""Outputs that AsyncLLM could not process, and which replicas are distrusted for them."""

from collections.abc import Callable, Sequence

from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.pool.pool_member import PoolMember, stage_and_replica
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import OutputUnusable

logger = init_logger(__name__)

REMEMBERED_S = 600.0
"""Seconds for which the bad output of one replica keeps the others trusted."""


class BadOutputs:
    """Tells a broken replica from a request whose outputs cannot be processed wherever it runs.

    The first replica that sends a bad output is taken for broken. If another replica has sent one within
    `REMEMBERED_S`, the requests or the server's own code are the likely cause, and no replica is distrusted. So a
    client that sends such a request again and again takes out one replica at most.

    Args:
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
        # Time of the last bad output, by the replica's name.
        self._last: dict[str, float] = {}

    def handle(self, message: OutputUnusable) -> None:
        stage_id, replica_id = stage_and_replica(message.engine_index)
        pool = self._pools[stage_id]
        member = next((member for member in pool.members if member.replica_id == replica_id), None)
        if member is None or member.client is None:
            # It was lost meanwhile.
            return
        reason = f"its output for request {message.request_id} could not be processed: {message.reason}"
        why_trusted = self._why_trusted(pool, member)
        if why_trusted:
            logger.error("Replica %s stays in service, since %s (%s).", member.name, why_trusted, reason)
        else:
            self._distrust(member, reason)

    def _why_trusted(self, pool: StagePool, member: PoolMember) -> str:
        """Why the sender of a bad output stays trusted; "" if it does not."""
        now = self._clock()
        self._last = {name: at for name, at in self._last.items() if now - at < REMEMBERED_S}
        others = sorted(self._last.keys() - {member.name})
        self._last[member.name] = now
        if others:
            return f"{', '.join(others)} sent bad outputs lately, too, so that requests may be the cause"
        if pool.lockstep:
            return "the other ranks of its group would end with it"
        if all(other is member for other in pool.serving):
            return "no other replica serves"
        return ""
