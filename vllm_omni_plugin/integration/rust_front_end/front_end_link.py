"""The front end that is vLLM's Rust program: to it, the whole fleet is one engine."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any, NamedTuple

import zmq
from vllm.v1.engine import EngineCoreOutputs

from vllm_omni_plugin.admin.http_admission import BadTimeoutError
from vllm_omni_plugin.admission import RequestTerms
from vllm_omni_plugin.errors import (
    MessageTooLargeError,
    NoReplicaError,
    OmniError,
    QueryOfDeathError,
    RequestLostError,
    RequestRefusedError,
    StageInputError,
    WireError,
)
from vllm_omni_plugin.integration.core_client.utility_calls import UtilityCallClient
from vllm_omni_plugin.integration.rust_front_end.fleet_adapters import FleetAdapters
from vllm_omni_plugin.integration.rust_front_end.front_end_calls import FrontEndCalls
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.orchestrator import OrchestratorRequestState
from vllm_omni_plugin.orchestrator.fleet_state.server_updates import AbortedElsewhere, EngineStateUpdate, complete
from vllm_omni_plugin.orchestrator.front_end import FrontEnd
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import (
    AbortRequests,
    OutputUnusable,
    ReplicaJoined,
    ReplicaLeft,
    RequestFailed,
    RequestMessage,
    SubmitRequest,
)
from vllm_omni_plugin.replicas.links.frames import send_frames
from vllm_omni_plugin.replicas.links.link import SocketReader
from vllm_omni_plugin.vllm_api.codecs.front_end_arrays import find_unreadable
from vllm_omni_plugin.vllm_api.codecs.front_end_codec import IDENTITY, FrontEndCodec
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Frames
from vllm_omni_plugin.vllm_api.engine_messages.request_building import drop_transfers

logger = init_logger(__name__)

_MAX_IN_SOCKET = 256
_REPORT_EVERY_S = 0.1
_INVALID = (BadTimeoutError, StageInputError, MessageTooLargeError)
_UNAVAILABLE = (NoReplicaError, RequestRefusedError, RequestLostError)


class FrontEndAddresses(NamedTuple):
    """Where one start of the front end listens: its ROUTER for requests, and its PULL for outputs."""

    input_addr: str
    output_addr: str


class FrontEndRules(NamedTuple):
    """What the rest of the process decides about requests.

    Attributes:
        why_closed: called for each request; returns the message with which it is refused; "": it is not.
        read_terms: reads the tenant and deadline of a request, and removes them from it. Raises `BadTimeoutError`. None
            without admission control.
        keep_statistics: called with the reports of 0.1 s, each the engine index and vLLM's `SchedulerStats`. Returns
            those of one engine in place of all replicas.
        replica_changed: called for each replica that joins or leaves after the start.
        adapters_changed: see `FleetAdapters`.
        watermarks: whether engines are configured to mark their answers.
    """

    why_closed: Callable[[], str]
    read_terms: Callable[[Any], RequestTerms] | None
    keep_statistics: Callable[[Sequence[tuple[int, Any]]], Iterable[Any]]
    replica_changed: Callable[[ReplicaJoined | ReplicaLeft], None]
    adapters_changed: Callable[[Future[None] | None], None]
    watermarks: bool = False


class FrontEndLink(FrontEnd):
    """Reads the front end's requests on the orchestrator's loop, and writes outputs to it, without a thread between.

    The front end may be replaced at any time: `connect` begins with a new one, and what the former one wanted is
    aborted. All methods are for the orchestrator's loop but those that say otherwise.

    Attributes:
        adapters: of the fleet; after `bind`.
        first_ready_response: of the first replica that can answer prompts and came after the start.
        ended: done when nothing is served any more.
    """

    def __init__(self) -> None:
        self._codec = FrontEndCodec()
        self._states: Mapping[str, OrchestratorRequestState] = {}
        self._fleet_calls: UtilityCallClient | None = None
        self._calls: FrontEndCalls | None = None
        self._rules: FrontEndRules | None = None
        self._drops_transfers = False
        self._handle: Callable[[RequestMessage], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closing = asyncio.Event()
        self._closed = False
        self._sockets: list[zmq.Socket[bytes]] = []
        self._reader: SocketReader | None = None
        self._unsent: deque[Frames] = deque()
        # Handled all together, since to handle each at once takes as long as to hand on its outputs.
        self._reports: list[tuple[int, Any]] = []
        self._reporting: asyncio.TimerHandle | None = None
        self._answering: set[asyncio.Task[None]] = set()
        self._prompt_stage = 0
        self.first_ready_response: Future[bytes] = Future()
        self.ended: Future[None] = Future()

    def bind(
        self, states: Mapping[str, OrchestratorRequestState], calls: UtilityCallClient, rules: FrontEndRules
    ) -> None:
        """Pass the parts that are created after this object. Before the first `connect`; from any thread."""
        self._states, self._fleet_calls, self._rules = states, calls, rules
        self.adapters = FleetAdapters(calls, rules.adapters_changed)
        self._drops_transfers = calls.stages.pipeline is not None
        self._prompt_stage = calls.stages.prompt_stage

    def connect(self, addresses: FrontEndAddresses, ready_response: bytes) -> None:
        """Serve the front end that listens there, and no other. From any thread; ignored after `close`."""
        self._on_loop(self._connect, addresses, ready_response)

    def disconnect(self) -> None:
        """The front end has ended: abort what it wanted. From any thread."""
        self._on_loop(self._disconnect)

    async def serve(self, handle: Callable[[RequestMessage], None]) -> None:
        self._handle, self._loop = handle, asyncio.get_running_loop()
        try:
            if not self._closed:
                await self._closing.wait()
        finally:
            self._closed = True
            self._disconnect()
            self.ended.set_result(None)

    @property
    def queued(self) -> int:
        """Always 0: what has not been read is in sockets."""
        return 0

    def give(self, item: Any) -> None:
        """Send outputs, statistics and events to the front end; an unreadable output fails its request only."""
        if isinstance(item, EngineCoreOutputs):
            if item.scheduler_stats is not None:
                self._reports.append((item.engine_index, item.scheduler_stats))
                if self._reporting is None:
                    self._reporting = asyncio.get_running_loop().call_later(_REPORT_EVERY_S, self._send_statistics)
            for output, field in find_unreadable(item.outputs):
                item.outputs = [other for other in item.outputs if other is not output]
                self._fail_output(output.request_id, item.engine_index, f"its {field} cannot be read")
            if item.outputs:
                self._send(self._codec.encode_outputs(item))
            return
        try:
            self._handle_event(item)
        except Exception:
            # It would end the handling of a replica's outputs.
            logger.exception("%s could not be handled.", type(item).__name__)

    def give_later(self, item: Any) -> None:
        self.give(item)

    def _fail_output(self, request_id: str, engine_index: int, reason: str) -> None:
        """An output that the front end cannot read fails its request only, and its replica is reported for it."""
        self._fail(request_id, OmniError(f"The model's output could not be processed: {reason}"))
        # Later: the report may make requests of this replica move, whose outputs are being handled. First the abort,
        # since this request must not move.
        for message in (AbortRequests((request_id,), whole=True), OutputUnusable(request_id, engine_index, reason)):
            asyncio.get_running_loop().call_soon(self._submit, message)

    def stop_waiting(self) -> None:
        for task in self._answering:
            task.cancel()
        if self._reporting is not None:
            self._reporting.cancel()

    def close(self) -> None:
        self._closed = True
        self._on_loop(self._closing.set)

    def _on_loop(self, do: Callable[..., None], *args: Any) -> None:
        # The loop may have ended.
        with suppress(RuntimeError):
            if self._loop is not None:
                self._loop.call_soon_threadsafe(do, *args)

    def _connect(self, addresses: FrontEndAddresses, ready_response: bytes) -> None:
        self._disconnect()
        if self._closed:
            return
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        requests, outputs = self._sockets = [context.socket(zmq.DEALER), context.socket(zmq.PUSH)]
        requests.setsockopt(zmq.IDENTITY, IDENTITY)
        outputs.setsockopt(zmq.SNDHWM, _MAX_IN_SOCKET)
        for socket, address in zip(self._sockets, addresses, strict=True):
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(address)
        assert self._fleet_calls is not None
        self.adapters.front_end_starts()
        self._calls = FrontEndCalls(self._fleet_calls, self.adapters)
        requests.send(ready_response)
        self._reader = SocketReader(requests, self._receive)
        self._reader.resume()

    def _disconnect(self) -> None:
        """Give up the connection and abort what its front end asked for, since nobody reads the answers."""
        if self._reader is not None:
            self._reader.pause()
            self._reader = None
        if self._unsent:
            self._stop_watching()
        for socket in self._sockets:
            socket.close()
        self._sockets = []
        self._submit(AbortRequests(tuple(self._states), whole=True))

    def _submit(self, message: RequestMessage) -> None:
        assert self._handle is not None
        self._handle(message)

    def _receive(self, frames: list[Any]) -> None:
        """Submit, abort or call; a message that cannot be read is dropped, a request that fails is answered."""
        try:
            kind, payload = self._codec.decode(frames)
        except WireError as error:
            logger.error("A message of vLLM's front end is dropped: %s", error)
            return
        if kind == "add":
            try:
                self._submit_request(payload)
            except Exception as error:
                if not isinstance(error, OmniError):
                    logger.exception("Request %s cannot be served.", payload.request_id)
                self._fail(payload.request_id, error)
        elif kind == "abort":
            self._submit(AbortRequests(tuple(payload), whole=True))
        else:
            _, call_id, method, args = payload
            assert self._calls is not None
            answering = self._answer(self._calls, call_id, method, args)
            task = asyncio.get_running_loop().create_task(answering, name="omni-utility")
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)

    def _submit_request(self, request: Any) -> None:
        """Submit a request, refused while the head ends or drains; transfers and watermarks are dropped."""
        assert self._rules is not None
        refusal = self._rules.why_closed()
        if refusal:
            raise NoReplicaError(refusal)
        self._codec.read_params(request)
        if self._drops_transfers:
            # Only the pipeline sets the parameters of KV transfers.
            drop_transfers(request)
        if not self._rules.watermarks:
            # The front end asks every engine for a watermark. An answer with one depends on what was answered before,
            # so it could not resume on another engine. Requests that share these parameters get none either.
            request.sampling_params.watermarking = False
        if request.lora_request is not None:
            self.adapters.use_in(request)
        terms = None if self._rules.read_terms is None else self._rules.read_terms(request)
        self._submit(SubmitRequest(request, time.monotonic(), terms=terms))

    async def _answer(self, calls: FrontEndCalls, call_id: int, method: str, args: Sequence[Any]) -> None:
        """Make a call of the front end that has these. The next one gives its calls the same numbers."""
        try:
            frames = self._codec.encode_result(call_id, await calls.make(method, args))
        except Exception as error:  # every error of a call goes to its caller, as in vLLM
            frames = self._codec.encode_failure(call_id, str(error))
        if self._calls is calls:
            self._send(frames)

    def _send_statistics(self) -> None:
        self._reporting = None
        reports, self._reports = self._reports, []
        assert self._rules is not None
        try:
            for stats in self._rules.keep_statistics(reports):
                self._send(self._codec.encode_statistics(stats))
        except Exception:
            logger.exception("Statistics of engines could not be kept.")

    def _handle_event(self, item: Any) -> None:
        match item:
            case RequestFailed():
                self._fail(item.request_id, item.error)
            case ReplicaJoined() | ReplicaLeft():
                assert self._rules is not None
                if isinstance(item, ReplicaJoined) and item.stage_id == self._prompt_stage:
                    with suppress(InvalidStateError):
                        self.first_ready_response.set_result(item.ready_response)
                # Reports of before are those of the replica that leaves.
                if self._reporting is not None:
                    self._reporting.cancel()
                    self._send_statistics()
                self._rules.replica_changed(item)
            case AbortedElsewhere():
                self._abort_for_operator(item.request_ids)
                complete(item.applied)
            case EngineStateUpdate():
                self.adapters.refresh(item.applied)

    def _fail(self, request_id: str, error: Exception) -> None:
        """Answer with the error: 400 for invalid ones, 503 for what may be repeated, else 500."""
        if isinstance(error, _INVALID):
            self._send(self._codec.encode_invalid(request_id, str(error)))
        else:
            retryable = isinstance(error, _UNAVAILABLE) and not isinstance(error, QueryOfDeathError)
            self._send(self._codec.encode_refusal(request_id, str(error), retryable=retryable))

    def _abort_for_operator(self, client_ids: Sequence[str]) -> None:
        """Abort requests by their clients' ids, or all without ids, and tell the front end."""
        wanted = set(client_ids)
        aborted = [
            request_id
            for request_id, state in self._states.items()
            if not wanted or state.request.external_req_id in wanted
        ]
        self._submit(AbortRequests(tuple(aborted), whole=True))
        if aborted:
            self._send(self._codec.encode_aborted(aborted))

    def _send(self, frames: Frames) -> None:
        """Send an output; what the socket does not take waits, in order, until it does."""
        if not self._sockets:
            return
        if not self._unsent:
            try:
                send_frames(self._sockets[1], frames)
            except zmq.Again:
                self._loop_of_reader().add_reader(self._sockets[1].fileno(), self._send_waiting)
            else:
                return
        self._unsent.append(frames)

    def _send_waiting(self) -> None:
        """Called for each event of the socket, which is edge-triggered: sends until it is full or nothing waits."""
        while self._unsent:
            try:
                send_frames(self._sockets[1], self._unsent[0])
            except zmq.Again:
                return
            self._unsent.popleft()
        self._stop_watching()

    def _stop_watching(self) -> None:
        self._loop_of_reader().remove_reader(self._sockets[1].fileno())
        self._unsent.clear()

    def _loop_of_reader(self) -> asyncio.AbstractEventLoop:
        assert self._loop is not None
        return self._loop
