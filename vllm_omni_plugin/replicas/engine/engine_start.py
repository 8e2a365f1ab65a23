"""Starting an engine of this node without losing track of it, whenever the start is given up."""

import asyncio
import re
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import zmq

from vllm_omni_plugin.errors import ReplicaError
from vllm_omni_plugin.replicas.links.shared_memory import SharedMemory

T = TypeVar("T")

_ENDED_FROM_OUTSIDE = re.compile(r"SIGKILL|SIGTERM|SIGINT|exited with code 0\b")
"""The out-of-memory killer sends SIGKILL. vLLM's processes exit with code 0 when they are told to end."""


class Process(Protocol):
    """A running engine; `vllm_api.launch.engine_launch.EngineProcess` in service."""

    @property
    def pid(self) -> int: ...

    @property
    def sentinel(self) -> int: ...

    def exit_reason(self) -> str:
        """How it or a worker of it ended ("it was ended by SIGKILL"), as far as that is known by now, or "".

        Known once `sentinel` is readable. Of a worker, it is also known when the engine says that it is dead.
        """
        ...

    def shutdown(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...


def explained(reason: str, process: Process) -> str:
    """Why an engine is given up, with how it ended if that is known."""
    ended = process.exit_reason()
    return f"{reason}: {ended}" if ended else reason


def crashed(process: Process, reported: bool) -> bool:
    """Whether an engine crashed by itself, so that a request may be the cause, and was not ended from outside.

    Args:
        process: the engine's.
        reported: whether the engine said so, or what cannot be used; this counts if nobody knows how it ended.
    """
    ended = process.exit_reason()
    return not _ENDED_FROM_OUTSIDE.search(ended) if ended else reported


@runtime_checkable
class SharingProcess(Protocol):
    """A `Process` that may have the other end of some memory."""

    @property
    def memory(self) -> SharedMemory | None: ...


class Starting(Process, Protocol):
    """A `Process` from its spawn until it is ready."""

    def wait(self, input_addr: str, output_addrs: Sequence[str]) -> None: ...

    def abandon(self) -> None: ...


class Launcher(Protocol):
    """How engines are started; `vllm_api.launch.engine_launch.EngineLauncher` in service.

    Attributes:
        ready_timeout: seconds an engine may take from its handshake to its ready response.
        ready_timeout_variable: environment variable that sets it, "" if none does.
    """

    ready_timeout: float
    ready_timeout_variable: str

    def identity(self, replica_id: int) -> bytes: ...

    def start(self, replica_id: int) -> Starting: ...


@runtime_checkable
class GroupedLauncher(Protocol):
    """A `Launcher` whose replicas live and die in groups; `vllm_api.launch.group_launch.GroupLauncher` in service."""

    def group_of(self, replica_id: int) -> Sequence[int]: ...


async def start_engine(
    launcher: Launcher,
    executor: Executor,
    replica_id: int,
    input_addr: str,
    output_addrs: Sequence[str],
    router: "zmq.Socket[bytes]",
) -> tuple[Process, bytes]:
    """Spawn an engine and wait until it is ready; return its process and its ready response.

    Args:
        launcher: starts the process.
        executor: where the blocking parts run: spawning, and waiting for the model to load.
        replica_id: index of the engine among those of this node.
        input_addr: bound ipc address to which the engine connects for requests.
        output_addrs: bound ipc addresses to which it connects for outputs, by client index.
        router: bound to `input_addr`. Only this reads it, and nobody else may use it meanwhile.

    Raises:
        ReplicaError: the engine ended before it was ready, or did not say so in time. It is killed on any error.
    """
    starting = await spawn(executor, partial(launcher.start, replica_id), lambda engine: engine.abandon())

    def wait_until_ready() -> bytes:
        starting.wait(input_addr, output_addrs)
        if not router.poll(int(launcher.ready_timeout * 1000)):
            late = f"no ready response on {input_addr} within {launcher.ready_timeout:.0f} s"
            variable = launcher.ready_timeout_variable
            raise ReplicaError(f"{late}; {variable} sets how long an engine may take" if variable else late)
        return router.recv_multipart()[1]

    waiting = asyncio.get_running_loop().run_in_executor(executor, wait_until_ready)
    try:
        return starting, await asyncio.shield(waiting)
    except asyncio.CancelledError:
        # The thread ends as soon as it sees its engine gone; the sockets are in its hands until then.
        starting.kill()
        await asyncio.wait([waiting])
        # Its failure is the expected one; unread, it would be reported whenever the future is collected.
        waiting.exception()
        raise
    except BaseException:
        starting.kill()
        raise


async def spawn(executor: Executor, start: Callable[[], T], abandon: Callable[[T], None]) -> T:
    """Return what `start` spawns, in a thread of the executor; it is abandoned if nobody waits for it any more."""
    spawning = asyncio.get_running_loop().run_in_executor(executor, start)
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:
        # The thread goes on, and nobody else would ever know of what it spawns.
        await asyncio.wait([spawning])
        if spawning.exception() is None:
            abandon(spawning.result())
        raise
