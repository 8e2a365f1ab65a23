"""The processes of a Python stage seen from their parent: started as engines are, and what heads compare."""

import hashlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from importlib.metadata import version
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import msgspec

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.pipeline.stage import Stage
from vllm_omni_plugin.replicas.links.shared_memory import SharedMemory, new_shared_memory
from vllm_omni_plugin.vllm_api.launch.spawning import SPAWN_LOCK, describe_exit

logger = init_logger(__name__)

_CHILD_MODULE = "vllm_omni_plugin.stages.stage_main"
_SHUTDOWN_S = 5.0
_IDENTITY_BYTES = 2
_DIGEST_BYTES = 8


class StageParameters(msgspec.Struct, frozen=True):
    """What the process of a stage needs to start.

    Attributes:
        engine: `package.module:Class`.
        device_index: which of the node's accelerators it takes, counted round.
        output_addrs: where answers go, by client index.
        memory_fd: descriptor of memory shared with the head, which then is the only client.
    """

    stage: str
    engine: str
    options: dict[str, Any]
    device_index: int
    replica_id: int
    identity: bytes
    import_path: list[str]
    input_addr: str = ""
    output_addrs: list[str] = []
    memory_fd: int | None = None


class StageProcess:
    """Satisfies `replicas.engine.engine_start.Process`. Ends with this process at the latest.

    Not a `multiprocessing.Process`: that runs the parent's main module again in the child, and with it imports all of
    vLLM.

    Args:
        parameters: what it shall do, all of it but addresses and memory.
        share_memory: share memory with it, if the system has some.

    Attributes:
        sentinel: file descriptor that becomes readable when it exits; closed with this object.
        connection: to it; used for the start only.
        memory: our end of the shared memory; None once it was asked to end.
    """

    def __init__(self, parameters: StageParameters, share_memory: bool = False) -> None:
        self.memory: SharedMemory | None = None
        self._parameters = parameters
        self.connection, theirs = Pipe()
        with theirs, ExitStack() as ours:
            if share_memory:
                self._share_memory(ours)
            memory_fd = self._parameters.memory_fd
            name = f"{parameters.stage}.{parameters.replica_id}"
            # An own session: Ctrl-C is for the parent, which needs its stages until it has shut down in order.
            with SPAWN_LOCK:
                self._popen = subprocess.Popen(
                    [sys.executable, "-m", _CHILD_MODULE, str(theirs.fileno()), name],
                    pass_fds=[theirs.fileno()] if memory_fd is None else [theirs.fileno(), memory_fd],
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        self.pid = self._popen.pid
        self.sentinel = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self.sentinel)

    def _share_memory(self, until_spawned: ExitStack) -> None:
        try:
            fd = new_shared_memory()
            until_spawned.callback(os.close, fd)
            self.memory = SharedMemory(fd, 0)
            self._parameters = msgspec.structs.replace(self._parameters, memory_fd=fd)
        except OSError as error:
            logger.warning("Tensors go through sockets, since there is no memory to share: %s", error)

    def wait(self, input_addr: str, output_addrs: Sequence[str]) -> None:
        """Tell the process what to do, and block until it has loaded.

        Raises:
            ReplicaError: it failed, or was ended.
        """
        given = msgspec.structs.replace(self._parameters, input_addr=input_addr, output_addrs=list(output_addrs))
        reason = _ask(self.connection, self.sentinel, msgspec.msgpack.encode(given))
        if reason == "":
            return
        ended = describe_exit(self.exit_code(_SHUTDOWN_S))
        reason = reason or f"its process {ended}"
        replica = f"replica {given.replica_id} of stage '{given.stage}' ({given.engine})"
        raise ReplicaError(f"{replica} did not start: {reason}")

    def abandon(self) -> None:
        """End the process instead of waiting for it."""
        self.kill()
        self.connection.close()

    def exit_reason(self) -> str:
        code = self._popen.poll()
        return "" if code is None else f"it {describe_exit(code)}"

    def shutdown(self, timeout: float | None = None) -> None:
        """Ask it to end, wait `timeout` seconds (None: 5), then kill it. Blocks; idempotent."""
        self.memory = None
        self._popen.terminate()
        self.exit_code(_SHUTDOWN_S if timeout is None else timeout)
        self.connection.close()

    def kill(self) -> None:
        """End it at once. Does not block; idempotent."""
        self.memory = None
        if self._popen.poll() is None:
            self._popen.kill()
            threading.Thread(target=self._popen.wait, name="stage-reaper", daemon=True).start()

    def exit_code(self, timeout: float) -> int:
        """Wait `timeout` seconds for its end, then kill it; return its exit code, negative for a signal. Blocks."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout)
        self._popen.kill()
        return self._popen.wait()


def _ask(connection: Connection, sentinel: int, message: bytes) -> str | None:
    """Why the stage cannot start, "" if it has started; None if its process ends without an answer."""
    try:
        connection.send_bytes(message)
        wait([connection, sentinel])
        return connection.recv_bytes().decode()
    except (EOFError, OSError):
        return None


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
        parameters = StageParameters(
            stage=self._stage.name,
            engine=self._stage.engine,
            options=dict(self._stage.options),
            device_index=self._first_engine + replica_id,
            replica_id=replica_id,
            identity=self.identity(replica_id),
            import_path=sys.path,
        )
        process = StageProcess(parameters, self._share_memory)
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
