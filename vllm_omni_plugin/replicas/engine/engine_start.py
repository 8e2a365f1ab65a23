"""Starts an engine of this node; a start that is cancelled leaves no process behind."""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from typing import Protocol, TypeVar, runtime_checkable

import zmq

from vllm_omni_plugin.errors import ReplicaError

T = TypeVar("T")


class Process(Protocol):
    """The process of an engine, such as `vllm_api.launch.engine_launch.EngineProcess`."""

    @property
    def pid(self) -> int: ...

    @property
    def sentinel(self) -> int: ...

    def exit_reason(self) -> str:
        """How the engine or its worker ended, as in "it was ended by SIGKILL"; "" if not known yet.

        Known once `sentinel` is readable; for a worker also when the engine has reported its death.
        """
        ...

    def wait(self, input_addr: str, output_addrs: Sequence[str]) -> None:
        """Block until the engine has loaded its model."""

    def abandon(self) -> None:
        """End a process that is not ready yet."""

    def shutdown(self, timeout: float | None = None) -> None: ...

    def kill(self) -> None: ...


class Launcher(Protocol):
    """Starts engines, such as `vllm_api.launch.engine_launch.EngineLauncher`.

    Attributes:
        ready_timeout: seconds from the handshake to the ready response.
        ready_timeout_variable: environment variable that sets it, or "".
    """

    ready_timeout: float
    ready_timeout_variable: str

    def identity(self, replica_id: int) -> bytes: ...

    def start(self, replica_id: int) -> Process: ...

    def turn(self, replica_id: int) -> AbstractAsyncContextManager[None]:
        """Held from before an engine is spawned until it is ready, if it must not start while certain others do."""
        return nullcontext()


@runtime_checkable
class GroupedLauncher(Protocol):
    """A `Launcher` whose engines start and end in groups, as `vllm_api.launch.group_launch.GroupLauncher`."""

    def group_of(self, replica_id: int) -> Sequence[int]: ...


async def start_engine(
    launcher: Launcher,
    executor: Executor,
    replica_id: int,
    input_addr: str,
    output_addrs: Sequence[str],
    *,
    router: "zmq.Socket[bytes]",
) -> tuple[Process, bytes]:
    """Spawn an engine when it is its turn, and wait until it is ready; return its process and its ready response.

    The ipc addresses are bound, those for outputs by client index; no other code may use `router`, bound to
    `input_addr`, meanwhile. Raises ReplicaError if the engine ends or is not ready in time. It is killed on any error.
    """
    async with launcher.turn(replica_id):
        process = await spawn(executor, partial(launcher.start, replica_id), lambda process: process.abandon())

        def wait_until_ready() -> bytes:
            process.wait(input_addr, output_addrs)
            if not router.poll(int(launcher.ready_timeout * 1000)):
                late = f"no ready response on {input_addr} within {launcher.ready_timeout:.0f} s"
                variable = launcher.ready_timeout_variable
                raise ReplicaError(f"{late}; {variable} sets how long an engine may take" if variable else late)
            return router.recv_multipart()[1]

        waiting = asyncio.get_running_loop().run_in_executor(executor, wait_until_ready)
        try:
            return process, await asyncio.shield(waiting)
        except asyncio.CancelledError:
            # The thread uses the sockets until it has seen the end of the process.
            process.kill()
            await asyncio.wait([waiting])
            # Mark the expected exception as retrieved, or asyncio would log it.
            waiting.exception()
            raise
        except BaseException:
            process.kill()
            raise
        finally:
            # Its error has this frame, and the process would be kept until garbage is collected.
            del waiting


async def spawn(executor: Executor, start: Callable[[], T], abandon: Callable[[T], None]) -> T:
    """Run `start` in the executor and return its result; on cancellation the result is passed to `abandon`."""
    spawning = asyncio.get_running_loop().run_in_executor(executor, start)
    try:
        return await asyncio.shield(spawning)
    except asyncio.CancelledError:
        # The thread continues, and its process must not be left behind.
        await asyncio.wait([spawning])
        if spawning.exception() is None:
            abandon(spawning.result())
        raise
