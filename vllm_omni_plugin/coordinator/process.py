"""The coordinator's process seen from its parent, and the one line the child answers with."""

import os
import subprocess
import sys

import msgspec

from vllm_omni_plugin.errors import ConfigError, OmniError

_CHILD_MODULE = "vllm_omni_plugin.coordinator.child"
# glibc raises its threshold with the first large block that is freed, and then keeps what a burst of long lists took.
_MEMORY_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child serves on these addresses."""

    router_address: str
    pub_address: str


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The child cannot serve as it was told to, and ends."""

    reason: str


class ChildArguments(msgspec.Struct, frozen=True):
    """What the child is told to do, as one JSON argument; the fields are those of `OmniCoordinator`.

    Of the secrets only the path, because everybody may read the arguments of a process.
    """

    router_zmq_addr: str
    pub_zmq_addr: str
    heartbeat_timeout: float
    settle_time: float = 0.0
    secret_file: str | None = None
    first_numbers: dict[int, int] = {}


class CoordinatorProcess:
    """One child process. It ends when its standard input does, hence also with its parent.

    Must be created in a thread that lives as long as the child should: Linux tells the child of the end of the thread
    that made it, not of the process.
    """

    def __init__(self, arguments: ChildArguments) -> None:
        command = [sys.executable, "-m", _CHILD_MODULE, msgspec.json.encode(arguments).decode()]
        # An own session: Ctrl-C is for the parent, which needs the coordinator until it has shut down in order.
        self._popen: subprocess.Popen[bytes] = subprocess.Popen(
            command,
            env=_MEMORY_SETTINGS | os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._stdin = self._popen.stdin
        self._stdout = self._popen.stdout
        self.pid = self._popen.pid

    def wait_ready(self) -> Ready:
        """Block until the child serves. Raises `ConfigError` if it cannot as told, `OmniError` if it ends otherwise."""
        line = self._stdout.readline()
        if not line:
            raise OmniError(f"the coordinator process ended with code {self.wait()} before it was ready")
        try:
            answer = msgspec.json.decode(line, type=Ready | Refused)
        except msgspec.DecodeError as error:
            raise OmniError(f"the coordinator process answered {line!r} instead of being ready") from error
        if isinstance(answer, Refused):
            self.wait()
            raise ConfigError(answer.reason)
        return answer

    def wait(self) -> int:
        """Block until the child has ended and return its code, negative for a signal."""
        code = self._popen.wait()
        self._stdin.close()
        self._stdout.close()
        return code

    def stop(self) -> None:
        """Ask the child to end."""
        self._stdin.close()

    def kill(self) -> None:
        """End the child at once."""
        self._popen.kill()
