"""The coordinator's process seen from its parent, and what the child says: one line, then a beat now and then."""

import os
import select
import subprocess
import sys
from contextlib import suppress

import msgspec

from vllm_omni_plugin.errors import ConfigError, OmniError

_CHILD_MODULE = "vllm_omni_plugin.coordinator.process.coordinator_main"
# glibc raises its threshold with the first large block that is freed, and then keeps what a burst of long lists took.
_MEMORY_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}

BEAT = b"."
"""What the child writes for as long as its coordinator serves."""


Answer = tuple[str, str] | str
"""The child's line: the addresses of the ROUTER and the PUB that it serves on, or why it cannot serve."""


class ChildArguments(msgspec.Struct, frozen=True):
    """What the child is told to do; the fields are those of `OmniCoordinator`, times in seconds.

    It is one line of JSON on standard input, since everybody may read the arguments of a process.
    """

    router_zmq_addr: str
    pub_zmq_addr: str
    heartbeat_timeout: float
    beat_interval: float = 1.0
    settle_time: float = 0.0
    secret_file: str | None = None
    first_replica_ids: dict[int, int] = {}
    fingerprints: dict[int, dict[str, str]] = {}


class CoordinatorProcess:
    """One child process. It ends when its standard input does, hence also with its parent.

    Must be created in a thread that lives as long as the child should: Linux tells the child of the end of the thread
    that made it, not of the process.
    """

    def __init__(self, arguments: ChildArguments) -> None:
        command = [sys.executable, "-m", _CHILD_MODULE]
        # An own session: Ctrl-C is for the parent, which needs the coordinator until it has shut down in order.
        self._popen: subprocess.Popen[bytes] = subprocess.Popen(
            command,
            env=_MEMORY_SETTINGS | os.environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Poll knows nothing of a buffer of ours.
            bufsize=0,
            start_new_session=True,
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._stdin = self._popen.stdin
        self._stdout = self._popen.stdout
        # Should it have ended already, `wait_ready` says so.
        with suppress(BrokenPipeError):
            self._stdin.write(msgspec.json.encode(arguments) + b"\n")
        self._poll = select.poll()
        self._poll.register(self._stdout, select.POLLIN)
        self.pid = self._popen.pid

    def wait_ready(self, timeout: float) -> tuple[str, str]:
        """Block until the child serves; return the addresses of its ROUTER and its PUB.

        Raises:
            ConfigError: It cannot serve as it was told to.
            OmniError: It ended otherwise, or is not ready after ``timeout`` seconds.
        """
        if not self._poll.poll(timeout * 1000):
            raise OmniError(f"the coordinator process was not ready after {timeout} s")
        line = self._stdout.readline()
        if not line:
            raise OmniError(f"the coordinator process ended with code {self.wait()} before it was ready")
        try:
            answer: Answer = msgspec.json.decode(line, type=Answer)
        except msgspec.DecodeError as error:
            raise OmniError(f"the coordinator process answered {line!r} instead of being ready") from error
        if isinstance(answer, str):
            self.wait()
            raise ConfigError(answer)
        return answer

    def beats(self, timeout: float) -> bool:
        """Block until the next beat and return True, or False if the child has ended.

        Raises:
            TimeoutError: Neither came within ``timeout`` seconds.
        """
        # In two halves: to a child that was stopped together with its parent, the second is left after both go on.
        if self._poll.poll(timeout * 500) or self._poll.poll(timeout * 500):
            return bool(self._stdout.read(4096))
        raise TimeoutError

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
