"""Ranks of workers in a transfer of weights. vLLM's workers compute theirs from the number of their replica."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_omni_plugin.errors import RanksUnknownError
from vllm_omni_plugin.orchestrator.pool.stage_pool import StagePool


@dataclass(frozen=True)
class WorkerRanks:
    """Counts the workers that get weights, and tells whether trainers may connect. Safe to use from any thread.

    By stage, `numbers` are the replicas that the head started with, and `sizes` the workers of one. `is_open`: replicas
    of other processes may join.
    """

    pools: Sequence[StagePool]
    numbers: Mapping[int, range]
    sizes: Mapping[int, int]
    is_open: bool

    def count(self) -> int:
        """The number of workers, ranked from 0 after the trainers. RanksUnknownError: not known, or with gaps."""
        if self.is_open:
            raise RanksUnknownError(
                "The workers of this fleet cannot be counted, because replicas of other processes may join and leave "
                "it. Start the head without --omni-master-address and with --api-server-count 1, or transfer weights "
                "in a way that needs no ranks, such as the backend ipc or reload_weights."
            )
        ranks = [
            self.numbers[pool.stage_id][member.replica_id] * self.sizes[pool.stage_id] + worker
            for pool in self.pools
            for member in pool.members
            for worker in range(self.sizes[pool.stage_id])
        ]
        if sorted(ranks) != list(range(len(ranks))):
            raise RanksUnknownError(
                f"The workers that get weights have the ranks {', '.join(map(str, sorted(ranks)))}, and trainers need "
                "them without gaps: a replica was removed, or replicas of other stages are in between. Restart the "
                "head, and name the stages of this model first in the pipeline's file."
            )
        return len(ranks)

    def check_call(self, method: object, kwargs: Mapping[str, Any]) -> None:
        """Refuse to connect all workers with trainers (RanksUnknownError), if some would wait for ever for others."""
        match method, kwargs.get("init_info"):
            case "init_weight_transfer_engine", {"world_size": int(world_size), "rank_offset": int(rank_offset)}:
                self._require(world_size - rank_offset)

    def _require(self, workers: int) -> None:
        count = self.count()
        if workers != count:
            raise RanksUnknownError(
                f"`world_size` - `rank_offset` is {workers}, but this fleet has {count} workers: ask /get_world_size"
            )
        for pool in self.pools:
            for member in pool.members:
                if member.client is None:
                    raise RanksUnknownError(f"Replica {member.name} is not there now. Please try again later.")
