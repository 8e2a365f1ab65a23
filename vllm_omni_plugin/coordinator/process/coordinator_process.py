"""The parent's view of the coordinator's process, which writes one line and then a byte at intervals."""

import select
import subprocess
import sys
from contextlib import suppress

import msgspec

from vllm_omni_plugin.errors import ConfigError, OmniError
from vllm_omni_plugin.vllm_api.launch.leftovers import unmarked_environment

_CHILD_MODULE = "vllm_omni_plugin.coordinator.process.coordinator_main"
# Without it glibc raises this threshold when a large block is freed, and then keeps the memory of long lists.
_MEMORY_SETTINGS = {"MALLOC_MMAP_THRESHOLD_": str(128 * 1024)}

ALIVE_BYTE = b"."
"""Written by the child at intervals while its coordinator runs."""

Answer = tuple[str, str] | str
"""The child's first line: the bound addresses of ROUTER and PUB, or the reason why it cannot start."""


class ChildArguments(msgspec.Struct, frozen=True):
    """Arguments for `OmniCoordinator`: one line on standard input, since every user can read a command line."""

    router_zmq_addr: str
    pub_zmq_addr: str
    heartbeat_timeout: float
    alive_interval: float
    settle_time: float
    secret_file: str | None = None
    first_replica_ids: dict[int, int] = {}
    reserved_numbers: int = 0
    fingerprints: dict[int, dict[str, str]] = {}


class CoordinatorProcess:
    """One child process. It ends with its standard input, and with the thread that creates it (`_die_with_parent`)."""

    def __init__(self, arguments: ChildArguments) -> None:
        command = [sys.executable, "-m", _CHILD_MODULE]
        # In its own session, so that Ctrl-C reaches only the parent, which needs the coordinator during shutdown.
        self._popen: subprocess.Popen[bytes] = subprocess.Popen(
            command,
            env=_MEMORY_SETTINGS | unmarked_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # Unbuffered, because poll does not see data in a buffer of this process.
            bufsize=0,
            start_new_session=True,
        )
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        self._stdin = self._popen.stdin
        self._stdout = self._popen.stdout
        # If the child has ended already, `wait_ready` raises.
        with suppress(BrokenPipeError):
            self._stdin.write(msgspec.json.encode(arguments) + b"\n")
        self._poll = select.poll()
        self._poll.register(self._stdout, select.POLLIN)
        self.pid = self._popen.pid

    def wait_ready(self, timeout: float) -> tuple[str, str]:
        """Block until the coordinator runs; return the addresses of its ROUTER and its PUB.

        Raises `ConfigError` for its arguments, `OmniError` if it ended otherwise or is not ready in ``timeout``
        seconds.
        """
        if not self._poll.poll(timeout * 1000):
            raise OmniError(f"the coordinator process was not ready after {timeout} s")
        line = self._stdout.readline()
        if not line:
            raise OmniError(f"the coordinator process ended with exit status {self.wait()} before it was ready")
        try:
            answer: Answer = msgspec.json.decode(line, type=Answer)
        except msgspec.DecodeError as error:
            raise OmniError(f"the coordinator process answered {line!r} instead of being ready") from error
        if isinstance(answer, str):
            self.wait()
            raise ConfigError(answer)
        return answer

    def is_alive(self, timeout: float) -> bool:
        """Block until the next `ALIVE_BYTE`; False if the child has ended. Raises TimeoutError after ``timeout`` s."""
        # In two halves: after parent and child were stopped together and continue, the child still has the second half.
        if self._poll.poll(timeout * 500) or self._poll.poll(timeout * 500):
            return bool(self._stdout.read(4096))
        raise TimeoutError

    def wait(self) -> int:
        """Block until the child has ended; return its exit status, negative for a signal."""
        status = self._popen.wait()
        self._stdin.close()
        self._stdout.close()
        return status

    def stop(self) -> None:
        self._stdin.close()

    def kill(self) -> None:
        self._popen.kill()
