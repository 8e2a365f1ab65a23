"""A simulated engine: vLLM's engine-core protocol on sockets in front of the model, in real time."""

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.sim.model.engine_model import EngineModel
from vllm_omni_plugin.sim.model.sim_requests import SimOutput, to_request
from vllm_omni_plugin.stages.socket_engine import LINGER_MS, SocketEngine
from vllm_omni_plugin.vllm_api.codecs import sim_protocol
from vllm_omni_plugin.vllm_api.codecs.sim_protocol import ENGINE_DEAD, EngineCoreCodec, lora_id

logger = init_logger(__name__)


class SimulatedEngine(SocketEngine):
    """Steps the model in real time. `on_end` is called once when it ends for any reason."""

    kind = "a simulated engine"

    def __init__(self, model: EngineModel, log_stats: bool, on_end: Callable[[], None]) -> None:
        super().__init__(EngineCoreCodec())
        self._model = model
        self._log_stats = log_stats
        self._on_end: Callable[[], None] | None = on_end
        self._clients: dict[str, int] = {}
        self._next_step: asyncio.Handle | None = None
        self._loras: set[int] = set()
        self.death_reason = ""
        self._methods |= {
            "add_lora": self._add_lora,
            "collective_rpc": lambda method, timeout=None, args=(), kwargs=None: [None],
            "compute_weight_checksums": lambda: [{"weights": str(model.settings.seed)}],
            "get_supported_tasks": lambda: ("generate",),
            "list_loras": lambda: self._loras,
            "pin_lora": self._pin_lora,
            "remove_lora": self._remove_lora,
        }

    def end(self, last_frame: bytes | None = None, linger_ms: int = LINGER_MS) -> None:
        """Send `last_frame` on every output and end. With a linger of 0, unsent messages are lost. Idempotent."""
        if self._on_end is None:
            return
        self._stop_reading()
        if self._next_step is not None:
            self._next_step.cancel()
            self._next_step = None
        if last_frame is not None:
            for socket in self._outputs:
                socket.send(last_frame)
        for socket in self._sockets:
            socket.close(linger_ms)
        self._on_end()
        self._on_end = None

    @property
    def _computing(self) -> bool:
        return self._model.busy

    def _handle_invalid_message(self, error: WireError) -> None:
        self._die(str(error))

    def _fail(self, error: BaseException) -> None:
        self._die(repr(error), error)

    def _add(self, request: Any) -> None:
        if request.request_id in self._model:
            self._die(f"duplicate request id {request.request_id}")
            return
        if request.abort_immediately:
            return
        if self._pause_state.refuses:
            self._send([(request.client_index, sim_protocol.refusal(request.request_id))])
            return
        self._clients[request.request_id] = request.client_index
        try:
            self._model.submit(to_request(request), time.monotonic())
        except (ValueError, OverflowError) as error:
            logger.warning("Request %s is refused: %s", request.request_id, error)
            self._send_outputs([SimOutput(request.request_id, finish="error")])

    def _abort(self, request_ids: Iterable[str] | None, notify: bool) -> None:
        ids = self._model.request_ids if request_ids is None else request_ids
        known = [request_id for request_id in ids if request_id in self._model]
        self._model.abort(known)
        if notify:
            self._send_outputs([SimOutput(request_id, finish="abort") for request_id in known])
        for request_id in known:
            self._clients.pop(request_id, None)

    def _clear_cache(self) -> bool:
        return self._model.reset_prefix_cache()

    def _call(self, method: str, args: list[Any]) -> Any:
        result = super()._call(method, args)
        self._model.admitting = self._pause_state.pause_mode is None
        self._model.scheduling = self._pause_state.pause_mode != "keep"
        return result

    def _after_message(self) -> None:
        """Step after all received messages are handled, unless a step is scheduled already."""
        if self._next_step is None and self._on_end is not None:
            self._next_step = self._loop.call_soon(self._step)

    def _step(self) -> None:
        self._next_step = None
        try:
            self._compute()
        except Exception as error:
            self._fail(error)

    def _compute(self) -> None:
        step = self._model.step(time.monotonic())
        if step.next_time is not None:
            self._next_step = self._loop.call_later(max(0.0, step.next_time - time.monotonic()), self._step)
        reports = step.report is not None and self._log_stats
        self._send_outputs(step.outputs, sim_protocol.scheduler_stats(step.report) if reports else None)
        self._send_delayed_answers()

    def _send_outputs(self, outputs: Iterable[SimOutput], stats: Any | None = None) -> None:
        self._send([(self._clients[output.request_id], sim_protocol.output(output)) for output in outputs], stats)
        for output in outputs:
            if output.finish is not None:
                del self._clients[output.request_id]

    def _die(self, reason: str, error: BaseException | None = None) -> None:
        logger.error("A simulated engine dies: %s", reason, exc_info=error)
        self.death_reason = reason
        self.end(ENGINE_DEAD)

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
