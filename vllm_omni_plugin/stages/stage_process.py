"""Starts the processes of a Python stage, and makes the stage's fingerprint."""

import hashlib
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.metadata import version
from multiprocessing import Pipe
from multiprocessing.connection import wait
from typing import Any
from uuid import uuid4

import msgspec

from vllm_omni_plugin.config import FLEET_ENGINE
from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.pipeline import Stage
from vllm_omni_plugin.replicas.engine.engine_start import Launcher
from vllm_omni_plugin.replicas.links.shared_memory import SharedMemory, new_shared_memory
from vllm_omni_plugin.vllm_api.launch.leftovers import kill_marked
from vllm_omni_plugin.vllm_api.launch.spawning import SPAWN_LOCK, describe_exit

logger = init_logger(__name__)

_CHILD_MODULE = "vllm_omni_plugin.stages.stage_main"
_SHUTDOWN_S = 5.0
_DIGEST_BYTES = 8


class StageParameters(msgspec.Struct, frozen=True):
    """The parameters of a stage's process.

    The engine is `package.module:Class`. The index of its accelerator counts modulo their number. The head, with which
    memory is shared, is then the only client.
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
    """A stage's process; a `replicas.engine.engine_start.Process`. It exits when this process does.

    What it has started, such as loaders of data, is marked, and killed when it has ended.

    Not a `multiprocessing.Process`, which would run the parent's main module in the child and so import vLLM. With
    `share_memory` it shares memory with the process if the system allows it; `wait` adds the addresses to `parameters`.
    """

    def __init__(self, parameters: StageParameters, share_memory: bool = False) -> None:
        self.memory: SharedMemory | None = None
        self._parameters = parameters
        self.connection, theirs = Pipe()
        # A name where an engine has a file for its exit note.
        self._mark = f"/proc/{os.getpid()}/fd/stage-{uuid4().hex}"
        with theirs, ExitStack() as ours:
            if share_memory:
                self._share_memory(ours)
            memory_fd = self._parameters.memory_fd
            name = f"{parameters.stage}.{parameters.replica_id}"
            # In a session of its own: Ctrl-C must reach only the parent, which needs its stages until it shuts down.
            with SPAWN_LOCK:
                self._popen = subprocess.Popen(
                    [sys.executable, "-m", _CHILD_MODULE, str(theirs.fileno()), name],
                    pass_fds=[theirs.fileno()] if memory_fd is None else [theirs.fileno(), memory_fd],
                    env={**os.environ, FLEET_ENGINE: self._mark},
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                )
        self.pid = self._popen.pid
        self.sentinel = os.pidfd_open(self.pid)
        weakref.finalize(self, os.close, self.sentinel)

    def _share_memory(self, until_spawned: ExitStack) -> None:
        """Share memory with the process; if that is impossible, tensors go through sockets."""
        try:
            fd = new_shared_memory()
            until_spawned.callback(os.close, fd)
            self.memory = SharedMemory(fd, 0)
            self._parameters = msgspec.structs.replace(self._parameters, memory_fd=fd)
        except OSError as error:
            logger.warning("Tensors go through sockets, because memory cannot be shared: %s", error)

    def wait(self, input_addr: str, output_addrs: Sequence[str]) -> None:
        """Send the process its parameters, and block until it has loaded. Raises ReplicaError if it fails."""
        given = msgspec.structs.replace(self._parameters, input_addr=input_addr, output_addrs=list(output_addrs))
        reason: str | None = None
        with suppress(EOFError, OSError):
            self.connection.send_bytes(msgspec.msgpack.encode(given))
            wait([self.connection, self.sentinel])
            # Why the stage cannot start; "" if it has started.
            reason = self.connection.recv_bytes().decode()
        if reason != "":
            exit_code = self.exit_code(_SHUTDOWN_S)
            replica = f"replica {given.replica_id} of stage '{given.stage}' ({given.engine})"
            raise ReplicaError(f"{replica} did not start: {reason or f'its process {describe_exit(exit_code)}'}")

    def abandon(self) -> None:
        """Kill a process that nobody will wait for."""
        self.kill()
        self.connection.close()

    def exit_reason(self) -> str:
        code = self._popen.poll()
        return "" if code is None else f"it {describe_exit(code)}"

    def shutdown(self, timeout: float | None = None) -> None:
        """Send SIGTERM, wait `timeout` seconds (None: 5), then kill it. Blocks; idempotent."""
        self.memory = None
        self._popen.terminate()
        self.exit_code(_SHUTDOWN_S if timeout is None else timeout)
        self.connection.close()

    def kill(self) -> None:
        """Does not block; idempotent."""
        self.memory = None
        if self._popen.poll() is None:
            self._popen.kill()
            threading.Thread(target=self.exit_code, args=(None,), name="stage-reaper", daemon=True).start()

    def exit_code(self, timeout: float | None) -> int:
        """Wait `timeout` seconds for its end, then kill it; return its exit code, negative for a signal. Blocks."""
        with suppress(subprocess.TimeoutExpired):
            self._popen.wait(timeout)
        self._popen.kill()
        code = self._popen.wait()
        kill_marked(self._mark)
        return code


@dataclass(eq=False)
class PythonStageLauncher(Launcher):
    """Starts Python stages.

    `on_spawn` is called with each process id, on the thread that spawns it; `first_engine` is the number of engines of
    earlier stages on this node. Memory may be shared only with an only client. `ready_timeout` counts from the end of
    loading.
    """

    stage: Stage
    on_spawn: Callable[[int], None]
    first_engine: int = 0
    share_memory: bool = False
    ready_timeout: float = 30.0
    ready_timeout_variable: str = ""

    def identity(self, replica_id: int) -> bytes:
        return replica_id.to_bytes(2, "little")

    def start(self, replica_id: int) -> StageProcess:
        parameters = StageParameters(
            stage=self.stage.name,
            engine=self.stage.engine,
            options=dict(self.stage.options),
            device_index=self.first_engine + replica_id,
            replica_id=replica_id,
            identity=self.identity(replica_id),
            import_path=sys.path,
        )
        process = StageProcess(parameters, self.share_memory)
        try:
            self.on_spawn(process.pid)
        except BaseException:
            process.abandon()
            raise
        return process


def python_fingerprint(stage: Stage) -> dict[str, str]:
    """The fields that `replicas.replica_server.attached_heads.differences` compares, as text for operators."""
    options = msgspec.json.encode(stage.options, order="deterministic")
    return {
        "stage": str(stage.id),
        "stage name": stage.name,
        "stage class": stage.engine,
        "options": hashlib.blake2b(options, digest_size=_DIGEST_BYTES).hexdigest(),
        "plugin version": version("vllm-omni-plugin"),
    }
