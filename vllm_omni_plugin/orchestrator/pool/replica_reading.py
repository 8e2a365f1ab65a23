"""Back-pressure on replicas: whether their outputs are read, or stay in their sockets."""

from collections.abc import Sequence

from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool
from vllm_omni_plugin.replicas.client.stage_client import StageClient


class ReplicaReading:
    """Pauses and resumes the reading of all replicas together. Lives on the orchestrator's loop.

    Attributes:
        paused: whether nothing is read.
    """

    def __init__(self, stage_pools: Sequence[StagePool]) -> None:
        self._pools = stage_pools
        self.paused = False

    def pause(self) -> None:
        self.paused = True
        for client in self._clients():
            client.pause_reading()

    def resume(self) -> None:
        self.paused = False
        for client in self._clients():
            client.resume_reading()

    def attached(self, client: StageClient) -> None:
        """A replica begins to serve: during a pause, it is not read either."""
        if self.paused:
            client.pause_reading()

    def _clients(self) -> list[StageClient]:
        return [m.client for pool in self._pools for m in pool.members if m.client is not None]
