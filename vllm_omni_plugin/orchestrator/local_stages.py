"""The replicas of this node, of all stages."""

import asyncio
from collections.abc import Sequence

from vllm_omni_plugin.orchestrator.local_replicas import LocalReplicas
from vllm_omni_plugin.orchestrator.stage_pool import PoolMember


class LocalStages:
    """Starts and ends the replicas of several stages together. Lives on the orchestrator's loop.

    Args:
        stages: by stage.
    """

    def __init__(self, stages: Sequence[LocalReplicas]) -> None:
        self._stages = stages

    async def start(self) -> list[list[bytes]]:
        """Start all replicas of all stages at once and return their ready responses by stage, when all serve.

        Raises:
            ReplicaError: one did not start; call `close`, which ends the others.
        """
        try:
            async with asyncio.TaskGroup() as tasks:
                starts = [tasks.create_task(stage.start()) for stage in self._stages]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from errors
        return [start.result() for start in starts]

    def leave(self, member: PoolMember) -> None:
        """See `LocalReplicas.leave`."""
        self._stages[member.stage_id].leave(member)

    def restart_no_more(self) -> None:
        """See `LocalReplicas.restart_no_more`."""
        for stage in self._stages:
            stage.restart_no_more()

    async def close(self, timeout: float | None = None) -> None:
        """End all engines in parallel, giving each `timeout` seconds (None: vLLM's default). Idempotent."""
        await asyncio.gather(*(stage.close(timeout) for stage in self._stages))
