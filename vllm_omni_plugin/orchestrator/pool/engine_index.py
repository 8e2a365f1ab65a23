"""The number under which vLLM's metrics and logs know a replica."""

_STAGE_STRIDE = 10_000
"""More replicas than one head has sockets for."""


def engine_index(stage_id: int, replica_id: int) -> int:
    """An index that no replica of another stage has; those of stage 0 keep their ids."""
    return _STAGE_STRIDE * stage_id + replica_id


def stage_and_replica(index: int) -> tuple[int, int]:
    """The ids of the stage and the replica that have this index."""
    return divmod(index, _STAGE_STRIDE)
