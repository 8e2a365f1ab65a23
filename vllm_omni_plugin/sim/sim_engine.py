"""A simulated engine on its sockets: vLLM's engine-core protocol in front of the model, in real time."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq

from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.replicas.links.link import SocketReader
from vllm_omni_plugin.sim.model.engine_model import EngineModel, Step
from vllm_omni_plugin.sim.model.sim_requests import SimOutput, to_request
from vllm_omni_plugin.stages.utility_methods import UtilityMethods
from vllm_omni_plugin.vllm_api.protocol import sim_protocol
from vllm_omni_plugin.vllm_api.protocol.sim_protocol import ENGINE_DEAD, EngineSide, Frames, lora_id
from vllm_omni_plugin.vllm_api.requests.rest_state import pause_mode

logger = init_logger(__name__)

_LINGER_MS = 4000
"""How long last words may take, as in vLLM."""


class SimCalls(UtilityMethods):
    """Answers calls as far as they mean something to an engine without a model."""

    def __init__(self, model: EngineModel, abort: Callable[[list[str] | None, bool], None]) -> None:
        self._model = model
        self._loras: set[int] = set()
        own: dict[str, Callable[..., Any]] = {
            "add_lora": self._add_lora,
            "collective_rpc": lambda method, timeout=None, args=(), kwargs=None: [None],
            "compute_weight_checksums": lambda: [{"weights": str(model.settings.seed)}],
            "get_supported_tasks": lambda: ("generate",),
            "list_loras": lambda: self._loras,
            "pin_lora": self._pin_lora,
            "remove_lora": self._remove_lora,
        }
        super().__init__(abort, model.reset_prefix_cache, own, "a simulated engine")

    def call(self, method: str, args: list[Any]) -> Any:
        result = super().call(method, args)
        self._model.admitting = self.pause_mode is None
        self._model.scheduling = self.pause_mode != "keep"
        return result

    def _add_lora(self, fields: Any) -> bool:
        self._loras.add(lora_id(fields))
        return True

    def _remove_lora(self, adapter: int) -> bool:
        known = adapter in self._loras
        self._loras.discard(adapter)
        return known

    def _pin_lora(self, adapter: int) -> bool:
        if adapter not in self._loras:
            raise ValueError(f"adapter {adapter} is not loaded")
        return True


class SimulatedEngine:
    """Does what vLLM's engine core does between its sockets. Lives on the running event loop.

    Args:
        on_end: called once when it has ended in any way.
    """

    def __init__(self, model: EngineModel, log_stats: bool, on_end: Callable[[], None]) -> None:
        self._model = model
        self._log_stats = log_stats
        self._on_end: Callable[[], None] | None = on_end
        self._codec = EngineSide()
        self._calls = SimCalls(model, self._abort)
        self._clients: dict[str, int] = {}
        self._delayed_answers: list[tuple[int, Frames]] = []
        self._loop = asyncio.get_running_loop()
        self._next_step: asyncio.Handle | None = None
        self._reader: SocketReader | None = None
        self._sockets: list[zmq.Socket[bytes]] = []

    def connect(
        self,
        context: "zmq.Context[zmq.Socket[bytes]]",
        identity: bytes,
        input_addr: str,
        output_addrs: Sequence[str],
        ready_response: bytes,
    ) -> None:
        """Open the sockets, say that it is ready, and serve from here on."""
        self._sockets = [context.socket(zmq.DEALER), *(context.socket(zmq.PUSH) for _ in output_addrs)]
        dealer = self._sockets[0]
        dealer.setsockopt(zmq.IDENTITY, identity)
        for socket, address in zip(self._sockets, (input_addr, *output_addrs), strict=True):
            socket.setsockopt(zmq.LINGER, _LINGER_MS)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
            socket.connect(address)
        dealer.send(ready_response)
        self._reader = SocketReader(dealer, self._receive)
        self._reader.resume()

    def end(self, last_words: bytes | None = None, linger_ms: int = _LINGER_MS) -> None:
        """End, saying something on every output or nothing. Idempotent.

        Args:
            last_words: a frame, such as that of a death with notice.
            linger_ms: how long what has been said may take to arrive; 0 as when the process is killed.
        """
        if self._on_end is None:
            return
        if self._reader is not None:
            self._reader.pause()
        if self._next_step is not None:
            self._next_step.cancel()
            self._next_step = None
        if last_words is not None:
            for socket in self._sockets[1:]:
                socket.send(last_words)
        for socket in self._sockets:
            socket.close(linger_ms)
        self._on_end()
        self._on_end = None

    def _receive(self, frames: list[Any]) -> None:
        try:
            kind, payload = self._codec.decode([memoryview(frame) for frame in frames])
        except WireError as error:
            self._die(str(error))
            return
        if kind == "add":
            self._add(payload)
        elif kind == "abort":
            self._abort(payload, tell=False)
        else:
            self._answer(*payload)
        self._wake()

    def _add(self, request: Any) -> None:
        if request.request_id in self._model:
            self._die(f"duplicate request id {request.request_id}")
            return
        if request.abort_immediately:
            return
        self._clients[request.request_id] = request.client_index
        try:
            self._model.submit(to_request(request), time.monotonic())
        except (ValueError, OverflowError) as error:
            logger.warning("Request %s is refused: %s", request.request_id, error)
            self._send([SimOutput(request.request_id, finish="error")])

    def _answer(self, client_index: int, call_id: int, method: str, args: list[Any]) -> None:
        try:
            answer = self._codec.encode_result(call_id, self._calls.call(method, args))
        except Exception as error:  # whatever is wrong with a call is the caller's to know, as in vLLM
            answer = self._codec.encode_failure(call_id, f"Call to {method} method failed: {error}")
        if pause_mode(method, tuple(args)) == "wait":
            self._delayed_answers.append((client_index, answer))
            self._send_delayed_answers()
        else:
            self._sockets[1 + client_index].send_multipart(answer)

    def _abort(self, request_ids: list[str] | None, tell: bool) -> None:
        ids = self._model.request_ids if request_ids is None else request_ids
        known = [request_id for request_id in ids if request_id in self._model]
        self._model.abort(known)
        if tell:
            self._send([SimOutput(request_id, finish="abort") for request_id in known])
        for request_id in known:
            self._clients.pop(request_id, None)

    def _wake(self) -> None:
        """Step once everything that has arrived is handled, unless a step is due anyway."""
        if self._next_step is None and self._on_end is not None:
            self._next_step = self._loop.call_soon(self._step)

    def _step(self) -> None:
        step = self._model.step(time.monotonic())
        self._next_step = None
        if step.next_time is not None:
            self._next_step = self._loop.call_later(max(0.0, step.next_time - time.monotonic()), self._step)
        self._send(step.outputs, step)
        self._send_delayed_answers()

    def _send(self, outputs: Iterable[SimOutput], step: Step | None = None) -> None:
        by_client: defaultdict[int, list[Any]] = defaultdict(list)
        for output in outputs:
            by_client[self._clients[output.request_id]].append(sim_protocol.output(output))
            if output.finish is not None:
                del self._clients[output.request_id]
        stats = None
        if step is not None and step.report is not None and self._log_stats:
            stats = sim_protocol.scheduler_stats(step.report)
            # Statistics go to one client, whichever has outputs; as in vLLM, to the first if none has.
            by_client = by_client or defaultdict(list, {0: []})
        for client_index, messages in by_client.items():
            frames = self._codec.encode_outputs(messages, stats, time.monotonic())
            self._sockets[1 + client_index].send_multipart(frames)
            stats = None

    def _send_delayed_answers(self) -> None:
        if self._delayed_answers and not self._model.busy:
            for client_index, answer in self._delayed_answers:
                self._sockets[1 + client_index].send_multipart(answer)
            self._delayed_answers.clear()

    def _die(self, reason: str) -> None:
        logger.error("A simulated engine dies: %s", reason)
        self.end(ENGINE_DEAD)
