"""A fleet of vLLM's messages whose replicas the test plays, and a front end at its sockets that the test plays too."""

import asyncio
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import zmq
import zmq.asyncio
from vllm.sampling_params import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreReadyResponse,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
    UtilityOutput,
)
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder, UtilityResult

from tests.fakes.conditions import eventually
from tests.fakes.links import FakeLink
from tests.fakes.played_fleet import PlayedFleet
from vllm_omni_plugin.admission import AdmissionConfig, RequestTerms
from vllm_omni_plugin.balancing import LeastQueueLengthBalancer
from vllm_omni_plugin.integration.core_client.utility_calls import UtilityCallClient
from vllm_omni_plugin.integration.fleet_setup.stage_planning import FleetStages
from vllm_omni_plugin.integration.rust_front_end.front_end_link import FrontEndAddresses, FrontEndLink, FrontEndRules
from vllm_omni_plugin.orchestrator import Orchestrator, PoolMember, StagePool
from vllm_omni_plugin.orchestrator.dispatch.head_context import HeadRules
from vllm_omni_plugin.orchestrator.pool.stage_pool import PoolTraits
from vllm_omni_plugin.orchestrator.pool.worker_ranks import WorkerRanks
from vllm_omni_plugin.orchestrator.requests.orchestrator_messages import ReplicaJoined, ReplicaLeft
from vllm_omni_plugin.vllm_api.codecs.sim_protocol import EngineCoreCodec
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi

PATIENCE_S = 20.0

_sizes = {"world_size": 1, "data_parallel_size": 1, "tensor_parallel_size": 1, "pipeline_parallel_size": 1}
READY = MsgpackEncoder().encode(
    EngineCoreReadyResponse(
        **_sizes,
        decode_context_parallel_size=1,
        data_parallel_rank=0,
        max_model_len=512,
        num_gpu_blocks=100,
        block_size=16,
        dp_stats_address=None,
        dtype="float32",
        vllm_version="0.33.0",
        max_num_seqs=256,
        max_num_batched_tokens=2048,
        instance_id="instance",
        supports_lora=False,
        max_loras=0,
    )
)[0]


class EngineLink(FakeLink):
    """A `FakeLink` with vLLM's messages.

    Attributes:
        requests: the submitted `EngineCoreRequest`s, by their id at the engine.
        on_request: called for each of them.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.requests: dict[str, Any] = {}
        self.on_request: Callable[[EngineLink, Any], None] | None = None
        self._codec = EngineCoreCodec()
        self._encoder = MsgpackEncoder()
        self._said: deque[list[bytes]] = deque()

    def send(self, frames: Any) -> None:
        kind, body = self._codec.decode(frames)
        if kind == "add":
            self.added.append(body.request_id)
            self.requests[body.request_id] = body
            if self.on_request is not None:
                asyncio.get_running_loop().call_soon(self.on_request, self, body)
        elif kind == "abort":
            self.aborted += body
        else:
            _, *call = body
            self.calls.append((call[0], call[1], call[2]))
            if self.on_call is not None:
                asyncio.get_running_loop().call_soon(self.on_call, self, *call)

    def say_outputs(self, **fields: Any) -> None:
        # Large arrays are frames of their own.
        self._said.append([bytes(frame) for frame in self._encoder.encode(EngineCoreOutputs(**fields))])
        if not self.paused:
            self.drain()

    def drain(self) -> None:
        super().drain()
        while self._said and self._on_message is not None:
            self._on_message(self._said.popleft())

    def answer(self, call_id: int, result: Any = None) -> None:
        self.say_outputs(utility_output=UtilityOutput(call_id, result=UtilityResult(result)))

    def refuse(self, call_id: int, message: str = "no") -> None:
        self.say_outputs(utility_output=UtilityOutput(call_id, failure_message=message))


class RustFleet(PlayedFleet):
    """One stage behind a `FrontEndLink`. Use it as an asynchronous context manager.

    Attributes:
        why_closed: what new requests are refused with.
        read_terms: of the rules.
        keep_statistics: what the front end gets of a report.
        reports: engine index and statistics of each report.
        changes: replicas that joined or left.
        on_change: called for each of them.
        on_adapters: called when the adapters of the fleet have changed.
    """

    stages = FleetStages(None, [None])

    def __init__(
        self,
        replicas: int = 2,
        replica_wait: float = 0.0,
        admission: AdmissionConfig | None = None,
        ready_response: bytes = READY,
    ) -> None:
        self._ready_response = ready_response
        traits = PoolTraits(waits_for_room=admission is not None)
        self.pool = StagePool(0, LeastQueueLengthBalancer(random.Random(0)), clock=time.monotonic, traits=traits)
        self.link = FrontEndLink()
        self.orchestrator = Orchestrator(
            [self.pool],
            [EngineApi()],
            HeadRules(3, replica_wait, admission=admission),
            time.monotonic,
            front_end=self.link,
        )
        self.links: dict[int, EngineLink] = {}
        self.why_closed = ""
        self.read_terms: Callable[[Any], RequestTerms | None] = lambda request: None
        self.keep_statistics: Callable[[Any], Any] = lambda report: report
        self.reports: list[tuple[int, Any]] = []
        self.changes: list[ReplicaJoined | ReplicaLeft] = []
        self.on_change: Callable[[ReplicaJoined | ReplicaLeft], None] = self.changes.append
        self.on_adapters: Callable[[Any], None] = lambda applied: None
        self.calls = UtilityCallClient(self.orchestrator, self.stages, WorkerRanks((), {}, {}, is_open=False))
        self.link.bind(
            self.orchestrator.request_states,
            self.calls,
            FrontEndRules(
                lambda: self.why_closed,
                lambda request: self.read_terms(request),
                self._keep_statistics,
                lambda change: self.on_change(change),
                lambda applied: self.on_adapters(applied),
            ),
        )
        for replica_id in range(replicas):
            self.join(self.pool.add(replica_id))

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        # Its first steps begin to serve.
        for _ in range(10):
            await asyncio.sleep(0)
        return self

    def kill(self, replica_id: int) -> None:
        client = self.pool.member(replica_id).client
        assert client is not None
        client.mark_dead("its engine process exited")

    def join(self, member: PoolMember) -> EngineLink:
        link = self.links[member.replica_id] = EngineLink(f"replica-{member.replica_id}")
        self.serve(member, link, EngineApi(), self._ready_response)
        return link

    def run_of(self, request_id: str) -> tuple[EngineLink, str]:
        """The engine that has a request, and its id there."""
        run = self.orchestrator.request_states[request_id].runs[0]
        assert run.replica_id is not None
        return self.links[run.replica_id], run.engine_request_id

    def say(self, request_id: str, *tokens: int, finish: FinishReason | None = None, **fields: Any) -> None:
        """Send an output from the engine that has a request."""
        link, engine_id = self.run_of(request_id)
        link.say_outputs(outputs=[EngineCoreOutput(engine_id, list(tokens), finish_reason=finish, **fields)])

    async def has(self, *request_ids: str) -> None:
        """Return when these requests are unfinished, and no others."""
        await eventually(lambda: set(self.orchestrator.request_states) == set(request_ids), f"having {request_ids}")

    def _keep_statistics(self, reports: Sequence[tuple[int, Any]]) -> list[Any]:
        self.reports += reports
        return [self.keep_statistics(report) for _, report in reports]


class PlayedFrontEnd:
    """The sockets at which `vllm-rs` listens. Use it as an asynchronous context manager, in a folder of its own.

    Args:
        unread: messages that it keeps while the test reads none.
    """

    def __init__(self, folder: Path, unread: int = 1000) -> None:
        self.addresses = FrontEndAddresses(f"ipc://{folder}/{id(self)}-in", f"ipc://{folder}/{id(self)}-out")
        self._context = zmq.asyncio.Context()
        self._requests = self._context.socket(zmq.ROUTER)
        self._outputs = self._context.socket(zmq.PULL)
        for socket, address in zip((self._requests, self._outputs), self.addresses, strict=True):
            socket.setsockopt(zmq.RCVHWM, unread)
            socket.bind(address)
        self._requests.setsockopt(zmq.ROUTER_MANDATORY, 1)
        # The same engine may connect again.
        self._requests.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._encoder = MsgpackEncoder()
        self._decoder = MsgpackDecoder(EngineCoreOutputs)
        self._identity = b""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._context.destroy(linger=0)

    async def greeted(self) -> bytes:
        """The ready response of the engine, when it connects."""
        self._identity, ready = await self._receive(self._requests)
        return ready

    async def send(self, kind: EngineCoreRequestType, body: Any) -> None:
        await self.send_frames(kind.value, *self._encoder.encode(body))

    async def send_frames(self, *frames: Any) -> None:
        await self._requests.send_multipart([self._identity, *frames])

    async def add(self, request_id: str, **fields: Any) -> None:
        await self.send(EngineCoreRequestType.ADD, request(request_id, **fields))

    async def abort(self, *request_ids: str) -> None:
        await self.send(EngineCoreRequestType.ABORT, list(request_ids))

    async def call(self, call_id: int, method: str, *args: Any) -> None:
        await self.send(EngineCoreRequestType.UTILITY, (0, call_id, method, args))

    async def read(self) -> Any:
        """The next `EngineCoreOutputs`."""
        return self._decoder.decode(await self._receive(self._outputs))

    async def read_output(self) -> EngineCoreOutput:
        """The only output of the next message."""
        [output] = (await self.read()).outputs
        return output

    async def _receive(self, socket: Any) -> list[bytes]:
        async with asyncio.timeout(PATIENCE_S):
            frames: list[bytes] = await socket.recv_multipart()
        return frames


def request(request_id: str, **fields: Any) -> EngineCoreRequest:
    values: dict[str, Any] = {
        "prompt_token_ids": [1, 2, 3],
        "mm_features": None,
        "sampling_params": SamplingParams(max_tokens=8),
        "pooling_params": None,
        "arrival_time": 0.0,
        "lora_request": None,
        "cache_salt": None,
        "data_parallel_rank": None,
        "external_req_id": request_id.split("-")[0],
    }
    return EngineCoreRequest(request_id, **{**values, **fields})
