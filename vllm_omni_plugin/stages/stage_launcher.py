"""Starting the processes of a Python stage the way engines are started, and what their heads compare."""

import hashlib
import sys
from collections.abc import Callable
from importlib.metadata import version

import msgspec

from vllm_omni_plugin.pipeline.stage import Stage
from vllm_omni_plugin.stages.assignment import Assignment
from vllm_omni_plugin.stages.stage_process import StageProcess

_IDENTITY_BYTES = 2
_DIGEST_BYTES = 8


class PythonStageLauncher:
    """Satisfies `replicas.engine.engine_start.Launcher`.

    Args:
        on_spawn: called with the process id of each, on the thread that starts it.
        first_engine: number of engines on this node that come before those of this stage.
        share_memory: whether this process is their only client, so that memory can be shared with them.
    """

    ready_timeout: float = 30.0
    """Seconds a process may take to connect once it has loaded."""
    ready_timeout_variable = ""

    def __init__(
        self, stage: Stage, on_spawn: Callable[[int], None], first_engine: int = 0, share_memory: bool = False
    ) -> None:
        self._stage = stage
        self._on_spawn = on_spawn
        self._first_engine = first_engine
        self._share_memory = share_memory

    def identity(self, replica_id: int) -> bytes:
        """The ZMQ identity under which a replica connects, as in vLLM."""
        return replica_id.to_bytes(_IDENTITY_BYTES, "little")

    def start(self, replica_id: int) -> StageProcess:
        """Spawn the process of a replica."""
        assignment = Assignment(
            stage=self._stage.name,
            engine=self._stage.engine,
            options=dict(self._stage.options),
            device_index=self._first_engine + replica_id,
            replica_id=replica_id,
            identity=self.identity(replica_id),
            import_path=sys.path,
        )
        process = StageProcess(assignment, self._share_memory)
        try:
            self._on_spawn(process.pid)
        except BaseException:
            process.abandon()
            raise
        return process


def python_fingerprint(stage: Stage) -> dict[str, str]:
    """The fields to compare with `replicas.server.attached_heads.differences`, as text for an operator to read."""
    options = msgspec.json.encode(stage.options, order="deterministic")
    return {
        "stage": str(stage.id),
        "stage name": stage.name,
        "stage class": stage.engine,
        "options": hashlib.blake2b(options, digest_size=_DIGEST_BYTES).hexdigest(),
        "plugin version": version("vllm-omni-plugin"),
    }
