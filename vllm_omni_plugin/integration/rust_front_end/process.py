"""Keeps vLLM's Rust front end running on its listening sockets, with a standby that takes over when it ends."""

import argparse
import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import zmq
from vllm.entrypoints.openai.models.protocol import LoRAModulePath
from vllm.utils.network_utils import ZmqListener, make_zmq_listener

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.integration.rust_front_end.command import front_end_command
from vllm_omni_plugin.integration.rust_front_end.front_end_http import FrontEndHttp
from vllm_omni_plugin.integration.rust_front_end.front_end_link import FrontEndAddresses, FrontEndLink
from vllm_omni_plugin.keep_running import Backoff, keep_running
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator.fleet_state.server_updates import complete
from vllm_omni_plugin.other_loop import call_on
from vllm_omni_plugin.replicas.engine.socket_folder import new_ipc_address
from vllm_omni_plugin.vllm_api.engine_messages.adapter import Adapter
from vllm_omni_plugin.vllm_api.launch.leftovers import unmarked_environment
from vllm_omni_plugin.vllm_api.launch.spawning import describe_exit

logger = init_logger(__name__)

_NAME = "vLLM's Rust front end"
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 10.0
_HEALTHY_AFTER_S = 10.0
_UNHEALTHY = b" 503 "


class ListeningSockets(NamedTuple):
    """Where clients connect. Bound; they stay open while the front end is replaced, so connections wait in them."""

    http: socket.socket
    grpc: socket.socket | None

    def close(self) -> None:
        """Refuse new connections. Idempotent."""
        self.http.close()
        if self.grpc is not None:
            self.grpc.close()


class _Process:
    """A started front end. It loads its tokenizer, and then waits for its engine, which is the fleet."""

    def __init__(
        self, process: asyncio.subprocess.Process, listeners: list[ZmqListener], adapters: list[LoRAModulePath]
    ) -> None:
        self.adapters = adapters
        self.pid = process.pid
        self.ended = asyncio.ensure_future(process.wait())
        self._process = process
        self._listeners = listeners
        self.addresses = FrontEndAddresses(*(listener.address for listener in listeners))
        for listener in listeners:
            listener.close()

    def __str__(self) -> str:
        return f"{_NAME} (process {self.pid})"

    @property
    def has_failed(self) -> bool:
        """Whether it has ended with an error. After SIGTERM it exits with code 0."""
        return self._process.returncode is not None and self._process.returncode > 0

    @property
    def exit(self) -> str:
        return describe_exit(self._process.returncode)

    def signal(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            self._process.send_signal(signum)

    def is_stopped(self) -> bool:
        """Whether a signal has stopped it since the last call."""
        with suppress(ChildProcessError):
            return os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG) is not None
        return False

    async def until_end(self) -> None:
        # Not awaited directly: a cancelled caller would cancel it.
        await asyncio.wait((self.ended,))

    async def end(self) -> None:
        self.signal(signal.SIGKILL)
        await self.until_end()
        for listener in self._listeners:
            listener.cleanup()


class RustFrontEnd:
    """Starts `vllm-rs`, and replaces it when it ends, is stopped, or does not answer. Lives on the main thread's loop.

    A start with a large tokenizer takes seconds, so a second one is started in advance. It leaves the listening sockets
    alone until it is connected to the fleet. `args` are the command line as `vllm-rs` shall read it. Every
    `probe_interval` seconds it is asked for `/health`, and replaced after `probe_timeout` seconds without an answer.
    """

    def __init__(
        self,
        binary: str,
        args: argparse.Namespace,
        listening: ListeningSockets,
        link: FrontEndLink,
        *,
        watch: Callable[[int], None],
        probe_interval: float,
        probe_timeout: float,
    ) -> None:
        self._binary = binary
        self._args = args
        self._listening = listening
        self._link = link
        self._watch = watch
        self._probe_interval = probe_interval
        self._probe_timeout = probe_timeout
        self._http = FrontEndHttp(listening.http, args)
        self._loop: asyncio.AbstractEventLoop | None = None
        # Those that wait for the serving one to know the adapters; None while none serves.
        self._following: list[Future[None]] | None = None
        self._adapters_changed = asyncio.Event()
        self._adapters_given = False
        self._standby: _Process | None = None
        self.serving: _Process | None = None
        self._stopping = asyncio.Event()

    async def prepare(self) -> None:
        """Start the first one; returns at `stop`. The link must be bound.

        Raises OmniError if it ends by itself, which it does only if its arguments are wrong.
        """
        first = self._standby = await self._start()
        await first.until_end()
        if first.has_failed and not self._stopping.is_set():
            raise _not_served(first)
        # One that a signal has ended is replaced when it is needed.
        await self._stopping.wait()

    async def run(self, ready_response: bytes) -> None:
        """Serve until `stop`. Raises OmniError if the first one ends by itself before it answers."""
        self._loop = loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._end_stopped)
        # The signal may have come before.
        self._end_stopped()
        try:
            await keep_running(
                partial(self._serve, ready_response),
                Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _HEALTHY_AFTER_S),
                time.monotonic,
                self._wait_to_restart,
                must_start=lambda: not self._stopping.is_set(),
            )
        finally:
            loop.remove_signal_handler(signal.SIGCHLD)

    async def close(self) -> None:
        """End the standby. Idempotent; nothing is left after this and the end of `run`."""
        standby, self._standby = self._standby, None
        if standby is not None:
            await standby.end()

    def stop(self) -> None:
        """Refuse new connections, and make it finish its requests within `args.shutdown_timeout` seconds and end."""
        self._stopping.set()
        self._listening.close()
        if self._standby is not None:
            self._standby.signal(signal.SIGKILL)
        if self.serving is not None:
            self.serving.signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now; after `stop`."""
        if self.serving is not None:
            self.serving.signal(signal.SIGKILL)

    def adapters_changed(self, applied: "Future[None] | None") -> None:
        call_on(self._loop, self._follow_adapters, applied)

    def _follow_adapters(self, applied: "Future[None] | None") -> None:
        """Tell the serving process of changed adapters; one that starts later loads them first."""
        self._adapters_changed.set()
        if applied is not None and self._following is not None:
            self._following.append(applied)
        elif applied is not None:
            complete(applied)

    def _end_stopped(self) -> None:
        """SIGCHLD: one that a signal has stopped answers nobody. The kernel says so at once."""
        for process in (self.serving, self._standby):
            if process is not None and process.is_stopped():
                logger.error("%s was stopped by a signal.", process)
                process.signal(signal.SIGKILL)

    @asynccontextmanager
    async def _serve(self, ready_response: bytes) -> AsyncIterator[Awaitable[str]]:
        """Serve with the standby, if it is ready, else with a new process; start the next standby."""
        process, self._standby = self._standby, None
        if process is not None and not self._is_ready(process):
            await process.end()
            process = None
        if process is None:
            process = await self._start()
        self.serving = process
        try:
            self._link.connect(process.addresses, ready_response)
            if self._stopping.is_set():
                process.signal(signal.SIGTERM)
            if await self._health(process) is not None:
                logger.info("%s serves.", process)
                # It has loaded those of the command line.
                self._adapters_given = True
            elif process.has_failed:
                raise _not_served(process)
            self._following = []
            await self._start_standby()
            yield self._until_unwell(process)
        finally:
            self._link.disconnect()
            self._http.close()
            self.serving = None
            for applied in self._following or ():
                complete(applied)
            self._following = None
            await process.end()

    async def _start_standby(self) -> None:
        """Start a standby, unless one is ready; one that has ended or has other adapters is replaced."""
        standby = self._standby
        if self._stopping.is_set() or (standby is not None and self._is_ready(standby)):
            return
        if standby is not None:
            if standby.ended.done():
                logger.error("%s %s while it stood by; the next one is started.", standby, standby.exit)
            await self.close()
        try:
            self._standby = await self._start()
        except OSError as error:
            logger.error("There is no standby of %s: %s", _NAME, error)

    def _is_ready(self, standby: _Process) -> bool:
        """Whether a standby lives and has the adapters of now; if not, it is replaced."""
        return not standby.ended.done() and standby.adapters == self._adapters()

    def _adapters(self) -> list[LoRAModulePath]:
        """What the next one loads before it serves. The fleet has those of the command line, too, or had them."""
        in_fleet = self._link.adapters.in_fleet
        given = () if self._adapters_given else self._args.lora_modules or ()
        return [module for module in given if module.name not in in_fleet] + [
            LoRAModulePath(name, adapter.lora_path, adapter.base_model_name, adapter.is_3d_lora_weight)
            for name, adapter in in_fleet.items()
            if self._can_load(adapter)
        ]

    def _can_load(self, adapter: Adapter) -> bool:
        """Not one named like a model, or with a blank name or path: `vllm-rs` would not start."""
        models = self._args.served_model_name or [self._args.model]
        return adapter.lora_name not in models and not adapter.lora_name.isspace() and not adapter.lora_path.isspace()

    async def _start(self) -> _Process:
        args = copy(self._args)
        args.lora_modules = adapters = self._adapters()
        listeners: list[ZmqListener] = []
        try:
            listeners += [make_zmq_listener(new_ipc_address(), kind) for kind in (zmq.ROUTER, zmq.PULL)]
            http, grpc = self._listening
            requests, outputs = (listener.socket.fileno() for listener in listeners)
            grpc_socket = None if grpc is None else grpc.fileno()
            command = front_end_command(self._binary, args, http.fileno(), requests, outputs, grpc=grpc_socket)
            inherited = [http.fileno(), requests, outputs, *(() if grpc_socket is None else (grpc_socket,))]
            # A session of its own: a terminal's Ctrl-C is for this process, which then ends it.
            process = await asyncio.create_subprocess_exec(
                *command, pass_fds=inherited, env=unmarked_environment(), start_new_session=True
            )
        except BaseException:
            for listener in listeners:
                listener.cleanup()
            raise
        self._watch(process.pid)
        started = _Process(process, listeners, adapters)
        if self._stopping.is_set():
            # `stop` did not know it. While it has the listening sockets, connections are not refused.
            started.signal(signal.SIGKILL)
        return started

    async def _until_unwell(self, process: _Process) -> str:
        """Watch the serving process; returns why it is replaced: ended, silent, or it says that its engine is dead."""
        while True:
            changed = asyncio.ensure_future(self._adapters_changed.wait())
            await asyncio.wait(
                (process.ended, changed), timeout=self._probe_interval, return_when=asyncio.FIRST_COMPLETED
            )
            changed.cancel()
            if self._stopping.is_set():
                await process.until_end()
            if process.ended.done():
                return process.exit
            if self._adapters_changed.is_set():
                await self._share_adapters()
            await self._start_standby()
            status = await self._health(process, self._probe_timeout)
            if status is None and not process.ended.done():
                return f"has not answered for {self._probe_timeout:g} s"
            if status is not None and _UNHEALTHY in status:
                return "says that its engine is dead"

    async def _health(self, process: _Process, timeout: float | None = None) -> bytes | None:
        """See `FrontEndHttp.health`; None if the process has ended, or does not answer for so many seconds."""
        asking = asyncio.ensure_future(self._http.health())
        try:
            while True:
                asked_at = time.monotonic()
                # What is sent to one that has ended waits for the next one, which waits for this.
                done, _ = await asyncio.wait(
                    (asking, process.ended), timeout=timeout, return_when=asyncio.FIRST_COMPLETED
                )
                # Time in which this process did not run does not count.
                if done or time.monotonic() - asked_at <= (timeout or 0.0) + self._probe_interval:
                    break
            return asking.result() if asking.done() and not process.ended.done() else None
        finally:
            asking.cancel()

    async def _share_adapters(self) -> None:
        """Make the serving one load and unload what other heads have loaded and unloaded."""
        self._adapters_changed.clear()
        following, self._following = self._following or [], []
        adapters = self._link.adapters
        calls: list[tuple[str, str, dict[str, Any]]] = [
            (name, "/v1/unload_lora_adapter", {"lora_name": name}) for name in adapters.surplus
        ]
        for adapter in filter(self._can_load, adapters.missing):
            body = {"lora_name": adapter.lora_name, "lora_path": adapter.lora_path}
            calls.append(
                (adapter.lora_name, "/v1/load_lora_adapter", body | {"is_3d_lora_weight": adapter.is_3d_lora_weight})
            )
        for name, path, body in calls:
            try:
                async with asyncio.timeout(self._probe_timeout):
                    error = await self._http.post(path, body)
            except TimeoutError:
                error = "no answer"
            if error:
                logger.error(
                    "%s does not follow the other heads in adapter %r until it is replaced: %s. It needs "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, and the folder in VLLM_RUNTIME_LORA_ALLOWED_PATH_PREFIXES.",
                    _NAME,
                    name,
                    error,
                )
        for applied in following:
            complete(applied)

    async def _wait_to_restart(self, seconds: float, reason: str | Exception) -> bool:
        if self._stopping.is_set():
            # It was told to end, and does once its requests have finished.
            if reason != describe_exit(0):
                logger.error("%s %s; its requests are aborted.", _NAME, reason)
            return False
        logger.error("%s %s; it is replaced, and its requests are aborted.", _NAME, reason)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return not self._stopping.is_set()


def _not_served(process: _Process) -> OmniError:
    return OmniError(f"{process} {process.exit} before it served: its last lines say why")
