"""The client of an engine replica: vLLM's engine-core protocol over a link."""

import asyncio
import itertools
import secrets
from collections.abc import Callable, MutableMapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from vllm_omni_plugin.errors import NOT_ALLOWED, MessageTooLargeError, NotAllowedError, ReplicaError, WireError
from vllm_omni_plugin.logger import init_logger, printable
from vllm_omni_plugin.replicas.links.link import Link
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import ENGINE_SHUTTING_DOWN, Frames

logger = init_logger(__name__)

_REPORTED = "the engine reported its own death"
_MAX_DETAIL_CHARS = 300

LONG_CALLS = frozenset(
    {
        "add_lora",
        "collective_rpc",
        "compute_weight_checksums",
        "profile",
        "release_kv_cache_memory",
        "save_sharded_state",
        "sleep",
        "wake_up",
    }
)
"""Calls that may take long: they move, load or save weights, or run code of a user."""


class Codec(Protocol):
    """Encodes requests and calls, decodes outputs. Implemented by `vllm_api.engine_messages.engine_api.EngineApi`."""

    def encode_add(self, request: Any, engine_request_id: str, client_index: int) -> Frames: ...

    def encode_abort(self, engine_request_ids: Sequence[str]) -> Frames: ...

    def encode_utility(self, call_id: int, method: str, args: tuple[Any, ...], client_index: int) -> Frames: ...

    def decode_outputs(self, frames: Frames) -> Any: ...

    def is_engine_dead(self, frames: Frames) -> bool: ...


class EngineClient:
    """Talks to one engine replica by an open link, which it closes. Lives on one event loop.

    `on_outputs` gets every `EngineCoreOutputs` with request outputs or statistics. `on_dead` is called at most once,
    and never from inside a send, with the reason why the replica is dead; `engine_failed`: the engine crashed by itself
    or sent an invalid message. `grace` are the seconds in which `mark_dead_after_grace` waits for a better reason.
    `answered_at` is set by the caller that probes: monotonic seconds of the last answer of the engine or its replica
    server, 0 before the first. `client_index` is the engine's output that belongs to the link. Outputs are dropped
    while it `is_interrupted`, until `reset`.
    """

    def __init__(
        self,
        link: Link,
        codec: Codec,
        name: str,
        on_outputs: Callable[[Any], None],
        on_dead: Callable[[str], None],
        *,
        client_index: int = 0,
        grace: float = 0.0,
    ) -> None:
        self._link = link
        self._codec = codec
        self._name = name
        self._on_outputs = on_outputs
        self._on_dead = on_dead
        self._client_index = client_index
        self._grace = grace
        self._death_timer: asyncio.TimerHandle | None = None
        # Random start: an answer to another client of the same engine must not match one of our calls.
        self._call_ids = itertools.count(secrets.randbits(48))
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._long_calls = 0
        # Separate from calls: `interrupt` fails calls, but the answer to a probe shows that the hang is over.
        self._probes: dict[int, asyncio.Future[Any]] = {}
        # By engine-side id, see `try_request`.
        self._tried: dict[str, asyncio.Future[Any]] = {}
        self.is_reading = True
        self.answered_at = 0.0
        self.is_interrupted = False
        self._dead_reason: str | None = None
        self.engine_failed = False

    def __repr__(self) -> str:
        state = self._dead_reason or "alive"
        return f"<EngineClient replica {self._name} {self._link.input_addr}: {state}, {len(self._calls)} calls>"

    def start(self) -> None:
        self._link.start_reading(self._receive)

    def add_request(self, request: Any, engine_request_id: str) -> None:
        """Submit an `EngineCoreRequest`. A repeated engine request id would crash the engine. Raises as `Link.send`."""
        self._send(self._codec.encode_add(request, engine_request_id, self._client_index))

    def abort_requests(self, engine_request_ids: Sequence[str]) -> None:
        """Abort requests; the engine ignores finished ones. Raises `ReplicaError` if the replica is dead."""
        self._send(self._codec.encode_abort(engine_request_ids))

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the engine core. Raises `ReplicaError` if it fails or the engine dies before its answer."""
        is_long = method in LONG_CALLS
        self._long_calls += is_long
        try:
            return await self._call_and_wait(self._calls, method, args)
        finally:
            self._long_calls -= is_long

    async def probe(self) -> None:
        """Return when the engine's main loop has answered, which it does between two steps; see `Probe`.

        Raises as `call`, but `interrupt` does not fail it, and an engine that refuses calls during shutdown is alive.
        """
        await self._call_and_wait(self._probes, "is_sleeping", ())

    async def try_request(self, request: Any, timeout: float) -> None:
        """Return when the engine has sent an output of a copy of a request; abort the copy.

        Raises `ReplicaError` if none came for `timeout` seconds, or the replica is dead.
        """
        engine_request_id = f"tried-{secrets.token_hex(8)}"
        first_output: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._tried[engine_request_id] = first_output
        try:
            self.add_request(request, engine_request_id)
            async with asyncio.timeout(timeout):
                await first_output
        except TimeoutError:
            raise ReplicaError(f"it has stalled, and a request tried there got no token for {timeout:g} s") from None
        finally:
            self._tried.pop(engine_request_id, None)
            with suppress(ReplicaError):
                self.abort_requests([engine_request_id])

    @property
    def is_dead(self) -> bool:
        return self._dead_reason is not None

    @property
    def is_busy(self) -> bool:
        """Whether a call is open that may block the engine's main loop for long."""
        return self._long_calls > 0

    def interrupt(self, reason: str) -> None:
        """Fail open calls because the engine hangs, and drop outputs of requests until `reset`."""
        self.is_interrupted = True
        self._fail(self._calls, ReplicaError(f"replica {self._name} hangs: {reason}"))

    async def reset(self) -> None:
        """Abort every request, before new heads use the engine. A pause or sleep goes on. Raises as `call`."""
        # None means all requests to vLLM's scheduler.
        await self.call("abort_requests", None)
        self.is_interrupted = False

    def pause_reading(self) -> None:
        self.is_reading = False
        self._link.pause_reading()

    def resume_reading(self) -> None:
        self.is_reading = True
        self._link.resume_reading()

    def drain(self) -> None:
        """Handle messages that the replica sent before it died. Call before `mark_dead` when its process has exited."""
        self._link.drain()

    def mark_dead(self, reason: str, engine_failed: bool = False) -> None:
        """Fail open calls, refuse new ones, call `on_dead`. Only the first call has an effect."""
        if self._dead_reason is not None:
            return
        self._dead_reason, self.engine_failed = reason, engine_failed
        if self._death_timer is not None:
            self._death_timer.cancel()
        self._fail(self._calls, self._dead_error())
        self._fail(self._probes, self._dead_error())
        self._fail(self._tried, self._dead_error())
        # The owner has this client: a cycle would keep the descriptors of its engine until garbage is collected.
        on_dead, self._on_dead = self._on_dead, lambda reason: None
        on_dead(reason)

    def mark_dead_after_grace(self, reason: str, engine_failed: bool = False) -> None:
        """Call `mark_dead` after the grace time, unless another caller does before. Only the first call counts."""
        if not self._grace:
            self.mark_dead(reason, engine_failed)
        elif self._dead_reason is None and self._death_timer is None:
            mark_dead = partial(self.mark_dead, reason, engine_failed)
            self._death_timer = asyncio.get_running_loop().call_later(self._grace, mark_dead)

    def close(self) -> None:
        """Close the link; open calls fail. Idempotent."""
        self._link.close()
        self.mark_dead("closed")

    async def _call_and_wait(
        self, open_calls: dict[int, "asyncio.Future[Any]"], method: str, args: tuple[Any, ...]
    ) -> Any:
        call_id = next(self._call_ids)
        frames = self._codec.encode_utility(call_id, method, args, self._client_index)
        self._send(frames)
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        open_calls[call_id] = future
        try:
            return await future
        finally:
            open_calls.pop(call_id, None)
            # Its error has this frame, and what waits here would be kept until garbage is collected.
            del future

    def _fail(self, open_calls: MutableMapping[Any, "asyncio.Future[Any]"], error: ReplicaError) -> None:
        for future in open_calls.values():
            if not future.done():
                future.set_exception(error)
        open_calls.clear()

    def _dead_error(self) -> ReplicaError:
        return ReplicaError(f"replica {self._name} is gone: {self._dead_reason}")

    def _send(self, frames: Frames) -> None:
        if self._dead_reason is not None:
            raise self._dead_error()
        try:
            self._link.send(frames)
        except MessageTooLargeError:
            raise
        except ReplicaError as error:
            # In the loop's next turn: the caller may be in the middle of sending other requests.
            asyncio.get_running_loop().call_soon(self.mark_dead_after_grace, str(error))
            raise

    def _receive(self, frames: list[Any]) -> None:
        """Pass outputs and answers on; a message that cannot be read or handled takes the replica out."""
        if self._dead_reason is not None:
            # Its requests have moved, and its statistics would count as those of a serving replica.
            return
        try:
            outputs = self._codec.decode_outputs(frames)
            if outputs.utility_output is not None:
                self._resolve_call(outputs.utility_output)
            elif not self.is_interrupted:
                for output in outputs.outputs if self._tried else ():
                    if (tried := self._tried.pop(output.request_id, None)) is not None:
                        tried.set_result(None)
                self._on_outputs(outputs)
        except WireError as error:
            if self._codec.is_engine_dead(frames):
                self.mark_dead_after_grace(_REPORTED, engine_failed=True)
                return
            # The outputs in this message are lost, so later ones cannot be delivered.
            self.mark_dead(f"it sent an invalid message: {str(error)[:_MAX_DETAIL_CHARS]}", True)
        except Exception as error:
            # The error must not affect other replicas, and the requests must not wait for lost outputs.
            logger.exception("Outputs of replica %s could not be handled.", self._name)
            self.mark_dead(f"its outputs could not be handled: {str(error)[:_MAX_DETAIL_CHARS]}", True)

    def _resolve_call(self, reply: Any) -> None:
        """Give a call its answer or error; a probe is answered by an engine that shuts down, too."""
        future = self._calls.get(reply.call_id) or self._probes.get(reply.call_id)
        if future is None or future.done():
            return
        if reply.failure_message is None:
            future.set_result(reply.result.result)
        elif reply.failure_message == ENGINE_SHUTTING_DOWN and reply.call_id in self._probes:
            # The engine shuts down after its running requests. Its main loop has answered.
            future.set_result(None)
        else:
            kind = NotAllowedError if reply.failure_message.startswith(NOT_ALLOWED) else ReplicaError
            future.set_exception(kind(printable(reply.failure_message)))
