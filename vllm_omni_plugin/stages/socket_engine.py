"""The base of engines that are not vLLM's: the engine-core protocol on sockets, in front of a model."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar

import zmq

from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.links.link import SocketReader
from vllm_omni_plugin.vllm_api.codecs.stage_codec import Kind, StageCodec
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Frames
from vllm_omni_plugin.vllm_api.engine_messages.pause_state import PauseState, pause_mode

logger = init_logger(__name__)

LINGER_MS = 4000
"""Time for sending the last messages of an engine, as in vLLM."""
_FIRST_WEIGHTS = "default"


class SocketEngine(ABC):
    """Speaks vLLM's engine-core protocol. Runs on the event loop that runs when it is created."""

    kind: ClassVar[str]
    """Noun for the engine, for errors."""

    def __init__(self, codec: StageCodec) -> None:
        self._codec = codec
        self._loop = asyncio.get_running_loop()
        self._reader: SocketReader | None = None
        self._sockets: list[zmq.Socket[bytes]] = []
        self._delayed_answers: list[tuple[int, Frames]] = []
        self._pause_state = PauseState()
        self._weight_version = _FIRST_WEIGHTS
        # The utility methods of vLLM's engine core that apply here.
        self._methods: dict[str, Callable[..., Any]] = {
            "abort_requests": lambda ids: self._abort(ids, notify=False),
            "get_supported_tasks": lambda: (),
            "get_weight_version": lambda: self._weight_version,
            "is_scheduler_paused": lambda: self._pause_state.pause_mode is not None,
            "is_sleeping": lambda: self._pause_state.pause_mode is not None or bool(self._pause_state.asleep),
            "pause_generation": self._pause_generation,
            "pause_scheduler": self._pause,
            "profile": lambda *args: None,
            "release_kv_cache_memory": self._release_kv_cache_memory,
            "reset_encoder_cache": lambda: None,
            "reset_mm_cache": lambda: None,
            "reset_prefix_cache": lambda running=False, connector=False: self._clear_cache(),
            "resume_scheduler": self._pause_state.resume,
            "set_weight_version": self._set_weight_version,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
        }

    def connect(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        identity: bytes,
        input_addr: str,
        output_addrs: Sequence[str],
        ready_response: bytes,
    ) -> None:
        """Connect the sockets, send the ready response, and start to serve."""
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, identity)
        self._sockets = [dealer, *(context.socket(zmq.PUSH) for _ in output_addrs)]
        for socket, address in zip(self._sockets, (input_addr, *output_addrs), strict=True):
            socket.setsockopt(zmq.LINGER, LINGER_MS)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(address)
        dealer.send(ready_response)
        self._reader = SocketReader(dealer, self._receive)
        self._reader.resume()

    @property
    def _outputs(self) -> "list[zmq.Socket[bytes]]":
        """Sockets for answers, by client index."""
        return self._sockets[1:]

    @property
    @abstractmethod
    def _computing(self) -> bool:
        """Whether a pause in the mode `wait` must wait."""

    @abstractmethod
    def _add(self, request: Any) -> None:
        """Add a request; its client index is valid."""

    @abstractmethod
    def _abort(self, request_ids: Iterable[str] | None, notify: bool) -> None:
        """Drop requests by id, None for all; with `notify`, their clients get an output with the reason `abort`."""

    @abstractmethod
    def _clear_cache(self) -> bool:
        """Clear the prefix cache; returns whether it was cleared."""

    @abstractmethod
    def _after_message(self) -> None:
        """Called after each message."""

    @abstractmethod
    def _handle_invalid_message(self, error: WireError) -> None:
        """Called for frames that cannot be decoded."""

    @abstractmethod
    def _fail(self, error: BaseException) -> None:
        """End the engine after an unexpected error; otherwise its clients would wait for ever."""

    def _call(self, method: str, args: list[Any]) -> Any:
        if method not in self._methods:
            raise AttributeError(f"{self.kind} has no method {method!r}")
        return self._methods[method](*args)

    def _receive(self, frames: list[Any]) -> None:
        try:
            kind, payload = self._codec.decode([memoryview(frame) for frame in frames])
        except WireError as error:
            self._handle_invalid_message(error)
            return
        try:
            self._handle(kind, payload)
        except Exception as error:
            self._fail(error)

    def _handle(self, kind: Kind, payload: Any) -> None:
        if kind == "abort":
            self._abort(payload, notify=False)
        elif (client_index := payload.client_index if kind == "add" else payload[0]) not in range(len(self._outputs)):
            logger.warning("A message is dropped: there is no client %d.", client_index)
        elif kind == "add":
            self._add(payload)
        else:
            self._answer(*payload)
        self._after_message()

    def _answer(self, client_index: int, call_id: int, method: str, args: list[Any]) -> None:
        """Answer a call; one that pauses and waits is answered once nothing is computed."""
        try:
            answer = self._codec.encode_result(call_id, self._call(method, args))
        except Exception as error:  # every error of a call goes to its caller, as in vLLM
            answer = self._codec.encode_failure(call_id, f"Call to {method} method failed: {error}")
        if self._computing and pause_mode(method, tuple(args)) == "wait":
            self._delayed_answers.append((client_index, answer))
        else:
            self._put(client_index, answer)

    def _send(self, outputs: Iterable[tuple[int, Any]], stats: Any | None = None, stats_client: int = 0) -> None:
        """Send outputs by client index. As in vLLM one client gets `stats`: `stats_client` if there are no outputs."""
        by_client: defaultdict[int, list[Any]] = defaultdict(list)
        for client_index, output in outputs:
            by_client[client_index].append(output)
        if stats is not None and not by_client:
            by_client[stats_client] = []
        for client_index, client_outputs in by_client.items():
            self._put(client_index, self._codec.encode_outputs(client_outputs, stats, time.monotonic()))
            stats = None

    def _send_delayed_answers(self) -> None:
        """Answer the delayed pause calls once no request runs."""
        if not self._computing:
            for client_index, answer in self._delayed_answers:
                self._put(client_index, answer)
            self._delayed_answers.clear()

    def _put(self, client_index: int, frames: Frames) -> None:
        self._outputs[client_index].send_multipart(frames, copy=False)

    def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.pause()

    def _pause_generation(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self._pause_state.pause_generation(mode)
        self._after_pause(mode, clear_cache)

    def _pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        self._pause_state.pause(mode)
        self._after_pause(mode, clear_cache)

    def _sleep(self, level: int = 1, mode: str = "abort") -> None:
        self._pause_state.sleep(level, mode)
        self._after_pause(mode, clear_cache=level >= 1)

    def _after_pause(self, mode: str, clear_cache: bool) -> None:
        if mode == "abort":
            self._abort(None, notify=True)
        if clear_cache:
            self._clear_cache()

    def _wake_up(self, tags: list[str] | None = None) -> bool:
        self._pause_state.wake_up(tags)
        return not self._pause_state.asleep

    def _release_kv_cache_memory(self) -> None:
        if self._pause_state.pause_mode is None:
            raise RuntimeError("the engine must be paused first")
        self._pause_state.release_kv_cache()

    def _set_weight_version(self, version: str) -> None:
        self._weight_version = version
