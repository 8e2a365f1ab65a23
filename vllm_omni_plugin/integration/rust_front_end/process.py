"""Keeps vLLM's Rust front end running on its listening sockets."""

import argparse
import asyncio
import os
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import zmq
from vllm.utils.network_utils import ZmqListener, make_zmq_listener
from vllm.v1.utils import RustFrontendProcessManager

from vllm_omni_plugin.errors import OmniError
from vllm_omni_plugin.integration.rust_front_end.front_end_link import FrontEndAddresses, FrontEndLink
from vllm_omni_plugin.keep_running import Backoff, keep_running
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.engine.socket_folder import new_ipc_address

logger = init_logger(__name__)

_NAME = "vLLM's Rust front end"
_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
_HEALTHY_AFTER_S = 10.0
_LOCAL = {"": "127.0.0.1", "0.0.0.0": "127.0.0.1", "::": "::1"}
"""Addresses at which to reach a server that listens on all."""


class ListeningSockets(NamedTuple):
    """Where clients connect. Bound; they stay open while the front end is replaced, so connections wait in them."""

    http: socket.socket
    grpc: socket.socket | None


class RustFrontEnd:
    """Starts `vllm-rs`, and replaces it when it ends or is stopped. Lives on the loop of the main thread.

    Args:
        binary: path of `vllm-rs`.
        args: parsed command line of `vllm serve`, as `vllm-rs` shall read it.
        watch: called with the id of each started process, see `Reaper`.
    """

    def __init__(
        self,
        binary: str,
        args: argparse.Namespace,
        listening: ListeningSockets,
        link: FrontEndLink,
        watch: Callable[[int], None],
    ) -> None:
        self._binary = binary
        self._args = args
        self._listening = listening
        self._link = link
        self._watch = watch
        self._process: Any = None
        self._stopping = asyncio.Event()

    async def run(self, ready_response: bytes) -> None:
        """Keep it running until `stop`. None is left when this returns or raises.

        Raises OmniError if the first one ends before it answers, since the next would end the same way.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._end_stopped)
        try:
            await keep_running(
                partial(self._running, ready_response),
                Backoff(_FIRST_PAUSE_S, _LONGEST_PAUSE_S, _HEALTHY_AFTER_S),
                time.monotonic,
                self._wait_to_restart,
                must_start=lambda: not self._stopping.is_set(),
            )
        finally:
            loop.remove_signal_handler(signal.SIGCHLD)

    def stop(self) -> None:
        """Make it finish its requests and end. It does so within `args.shutdown_timeout` seconds."""
        self._stopping.set()
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now; after `stop`."""
        self._signal(signal.SIGKILL)

    def _signal(self, signum: int) -> None:
        if self._process is not None and self._process.is_alive():
            os.kill(self._process.pid, signum)

    def _end_stopped(self) -> None:
        """SIGCHLD: a front end that a signal has stopped answers nobody. The kernel says so at once."""
        if self._process is None:
            return
        with suppress(ChildProcessError):
            if os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG) is not None:
                logger.error("%s (process %d) was stopped by a signal.", _NAME, self._process.pid)
                self._signal(signal.SIGKILL)

    @asynccontextmanager
    async def _running(self, ready_response: bytes) -> AsyncIterator[Awaitable[str]]:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        listeners: list[ZmqListener] = []
        try:
            listeners += [make_zmq_listener(new_ipc_address(), kind) for kind in (zmq.ROUTER, zmq.PULL)]
            manager = self._start(*listeners)
        except BaseException:
            for listener in listeners:
                listener.cleanup()
            raise
        self._process = process = manager.processes[0]
        self._watch(process.pid)
        sentinel = process.sentinel.fileno()

        def on_end() -> None:
            loop.remove_reader(sentinel)
            ended.set()

        loop.add_reader(sentinel, on_end)
        try:
            self._link.connect(FrontEndAddresses(*(listener.address for listener in listeners)), ready_response)
            if self._stopping.is_set():
                self._signal(signal.SIGTERM)
            await self._until_answer(process, ended)
            logger.info("%s (process %d) serves.", _NAME, process.pid)
            yield _exit_reason(process, ended)
        finally:
            self._link.disconnect()
            self._signal(signal.SIGKILL)
            await ended.wait()
            manager.shutdown()
            self._process = None

    def _start(self, requests: ZmqListener, outputs: ZmqListener) -> Any:
        return RustFrontendProcessManager(
            binary_path=self._binary,
            sock=self._listening.http,
            grpc_sock=self._listening.grpc,
            args=self._args,
            input_listener=requests,
            output_listener=outputs,
            engine_start_index=0,
            engine_count=1,
            data_parallel_size=1,
        )

    async def _until_answer(self, process: Any, ended: asyncio.Event) -> None:
        """Return when it has answered; raises OmniError if it has ended before."""
        answering = asyncio.ensure_future(_ask_health(self._listening.http, bool(self._args.ssl_certfile)))
        ending = asyncio.ensure_future(ended.wait())
        try:
            await asyncio.wait((answering, ending), return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                raise OmniError(
                    f"{_NAME} (process {process.pid}) ended with code {process.exitcode} before it served: its last "
                    "lines say why"
                )
        finally:
            for waiting in (answering, ending):
                waiting.cancel()

    async def _wait_to_restart(self, seconds: float, reason: str | Exception) -> bool:
        # A signal of the terminal reaches both processes, and this one may see it later.
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        if not self._stopping.is_set():
            logger.error("%s %s; it is replaced, and its requests have been aborted.", _NAME, reason)
        return not self._stopping.is_set()


async def _exit_reason(process: Any, ended: asyncio.Event) -> str:
    await ended.wait()
    return f"(process {process.pid}) ended with code {process.exitcode}"


async def _ask_health(listening: socket.socket, tls: bool) -> None:
    """Return once the server behind this socket has answered or refused a request. It may be about to start."""
    context = None
    if tls:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    # A server that wants a client's certificate refuses this one, which is an answer too.
    with suppress(OSError):
        if listening.family == socket.AF_UNIX:
            reader, writer = await asyncio.open_unix_connection(listening.getsockname(), ssl=context)
        else:
            host, port = listening.getsockname()[:2]
            reader, writer = await asyncio.open_connection(_LOCAL.get(host, host), port, ssl=context)
        try:
            writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            await reader.read(1)
        finally:
            writer.close()
