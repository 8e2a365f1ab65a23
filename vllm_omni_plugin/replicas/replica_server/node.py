"""Runs and stops all replicas of one headless process."""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.replicas.machines.group_machine import GroupMachine
from vllm_omni_plugin.replicas.machines.other_machine import OtherMachine
from vllm_omni_plugin.replicas.replica_server.descriptor_limits import raise_limits, with_advice
from vllm_omni_plugin.replicas.replica_server.replica_server import ReplicaServer

_LEAVE_GRACE_S = 10.0
"""After the drain timeout, for the first machine of a replica to end its engine."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@asynccontextmanager
async def task_group_with_signals(on_signal: Callable[[int], None]) -> AsyncIterator[asyncio.TaskGroup]:
    """A task group whose first error is raised, with advice if no descriptor was left.

    SIGTERM and SIGINT only call `on_signal` meanwhile.
    """
    loop = asyncio.get_running_loop()
    for signum in SIGNALS:
        loop.add_signal_handler(signum, on_signal, signum)
    try:
        async with asyncio.TaskGroup() as tasks:
            yield tasks
    except ExceptionGroup as failures:
        raise with_advice(failures.exceptions[0]) from failures
    finally:
        for signum in SIGNALS:
            loop.remove_signal_handler(signum)


def drain_all(servers: Sequence[ReplicaServer]) -> None:
    for server in servers:
        server.drain()


async def run_node(
    servers: Sequence[ReplicaServer], join_timeout: float, head: str, machine: GroupMachine | None = None
) -> None:
    """Run replicas until all have stopped. The first SIGTERM or SIGINT drains them, the second stops them at once.

    If they are ranks of a lockstep group over several machines, `machine` is this one, and the others drain, too.
    Each replica must reach the head within `join_timeout` seconds (0: no limit) of the start of its engine. Raises
    OmniError if one fails, and ConfigError if they need more open files than allowed. All others have stopped then.
    """
    raise_limits(len(servers))
    is_draining = False

    def on_signal(signum: int) -> None:
        nonlocal is_draining
        if is_draining:
            if machine is not None:
                machine.stop_now()
            for server in servers:
                server.stop_now(f"its node received a second {signal.Signals(signum).name}")
            return
        is_draining = True
        if machine is not None:
            machine.leave()
        drain_all(servers)

    async with task_group_with_signals(on_signal) as tasks:
        running = []
        for server in servers:
            joining = tasks.create_task(_join(server, join_timeout, head))
            running.append(tasks.create_task(_run(server, joining)))
        if machine is not None:
            meeting = tasks.create_task(machine.run(join_timeout))
            await asyncio.wait(running)
            meeting.cancel()


async def _run(server: ReplicaServer, joining: "asyncio.Task[None]") -> None:
    try:
        await server.run()
    finally:
        joining.cancel()


async def _join(server: ReplicaServer, join_timeout: float, head: str) -> None:
    """End the node if no head has answered for `join_timeout` since its engine is ready."""
    await server.ready.wait()
    try:
        async with asyncio.timeout(join_timeout or None):
            await server.joined.wait()
    except TimeoutError:
        raise OmniError(
            f"no head answered at {head} within {join_timeout:g} s of the engine's start; check --omni-master-address, "
            "--omni-master-port and --omni-secret-file, or wait for the head with --omni-join-timeout 0"
        ) from None


async def run_machine(machine: OtherMachine, join_timeout: float, drain_timeout: float) -> None:
    """Run another machine of a replica until it has left. The first SIGTERM or SIGINT drains the replica, whose first
    machine takes up to `drain_timeout` seconds for that; the second stops this machine at once."""
    loop, is_leaving = asyncio.get_running_loop(), False

    def on_signal(signum: int) -> None:
        nonlocal is_leaving
        if is_leaving:
            machine.stop_now()
        else:
            machine.leave()
            loop.call_later(drain_timeout + _LEAVE_GRACE_S, machine.stop_now)
        is_leaving = True

    async with task_group_with_signals(on_signal) as tasks:
        tasks.create_task(machine.run(join_timeout))
