"""The engine's structs and protocol without vLLM: the same names, encoded as JSON."""

from collections.abc import Sequence
from typing import Any

import msgspec

from vllm_omni_plugin.balancing import Prompt, Task
from vllm_omni_plugin.errors import WireError
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import EngineSize, Frames, LoadReport, Move

DEAD_FRAME = b"DEAD"
UNREADABLE = b"\xc1"
"""An invalid ready response."""
REFUSED = "refused"
"""The finish reason of an engine that is paused and refuses requests."""
VOCABULARY = 10_000
"""Token ids of the model are below this."""


class FakeRequest(msgspec.Struct, frozen=True):
    """The fields of an `EngineCoreRequest` that the head reads, and values that vLLM would derive from it.

    Attributes:
        move: a value of `Move`.
        length: tokens to produce, 0: decided by the engine.
        stop: token at which the head ends the request; the engine does not know it.
    """

    request_id: str
    sampling_params: Any = None
    resumable: bool = False
    abort_immediately: bool = False
    affinity: int | None = None
    prompt: list[int] = []
    move: str = "resume"
    length: int = 0
    session: str | None = None
    mm_features: Any = None
    stop: int | None = None
    kv_transfer_params: dict[str, Any] | None = None
    priority: int = 0

    @property
    def prompt_token_ids(self) -> list[int]:
        return self.prompt


class FakeOutput(msgspec.Struct):
    """An `EngineCoreOutput`. `first` stands for the fields that only the first output of a request has."""

    request_id: str
    new_token_ids: list[int] = []
    finish_reason: str | None = None
    first: bool = False
    cached: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


class FakeResult(msgspec.Struct):
    """A `UtilityResult`."""

    result: Any = None


class FakeUtilityOutput(msgspec.Struct):
    """A `UtilityOutput`."""

    call_id: int
    failure_message: str | None = None
    result: FakeResult | None = None


class FakeOutputs(msgspec.Struct):
    """An `EngineCoreOutputs`; the statistics are the number of running requests."""

    engine_index: int = 0
    outputs: list[FakeOutput] = []
    scheduler_stats: int | None = None
    utility_output: FakeUtilityOutput | None = None


class FakeEngineApi:
    """Implements `Codec` and replaces `EngineApi`."""

    pooling_task: str | None = None
    schedules = True
    vocabulary: int | None = VOCABULARY
    outputs_type: type[FakeOutputs] = FakeOutputs

    def encode_add(self, request: Any, engine_request_id: str, client_index: int = 0) -> Frames:
        return (b"add", msgspec.json.encode(msgspec.structs.replace(request, request_id=engine_request_id)))

    def encode_abort(self, engine_request_ids: Sequence[str]) -> Frames:
        return (b"abort", msgspec.json.encode(list(engine_request_ids)))

    def encode_utility(self, call_id: int, method: str, args: tuple[Any, ...], client_index: int = 0) -> Frames:
        return (b"utility", msgspec.json.encode((call_id, method, args)))

    def decode_outputs(self, frames: Frames) -> Any:
        try:
            return msgspec.json.decode(frames[0], type=self.outputs_type)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WireError(str(error)) from error

    def is_engine_dead(self, frames: Frames) -> bool:
        return bytes(frames[0]) == DEAD_FRAME

    def describe(self, request: Any) -> tuple[Task, int | None]:
        task = Task(
            request_id=request.request_id,
            engine_inputs=request,
            sampling_params=request.sampling_params,
            prompt=Prompt(request.prompt),
            session=request.session,
            max_tokens=request.length or None,
        )
        return task, request.affinity

    def cached_tokens(self, output: Any) -> int | None:
        cached: int | None = output.cached
        return cached

    def load_report(self, outputs: Any, clear: bool = False) -> LoadReport | None:
        running = outputs.scheduler_stats
        if clear and running is not None:
            outputs.scheduler_stats = 0
        return None if running is None else LoadReport(0, running, running / 100)

    def engine_size(self, ready_response: bytes) -> EngineSize:
        if ready_response == UNREADABLE:
            raise WireError("not a ready response")
        return EngineSize(*msgspec.json.decode(ready_response)) if ready_response.startswith(b"[") else EngineSize()

    def cut_short(self, output: Any) -> bool:
        return output.finish_reason in ("abort", "error", REFUSED)

    def aborted(self, output: Any) -> bool:
        return bool(output.finish_reason == "abort")

    def refused(self, output: Any) -> bool:
        return bool(output.finish_reason == REFUSED)

    def awaits_cache(self, request: Any) -> bool:
        return "do_remote_prefill" in (request.kv_transfer_params or ())

    def without_hand_over(self, request: Any) -> Any:
        return msgspec.structs.replace(request, kv_transfer_params=None) if self.awaits_cache(request) else request

    def transfers_cache(self, request: Any) -> bool:
        return bool(request.kv_transfer_params)

    def idle_report(self, engine_index: int) -> Any:
        return FakeOutputs(engine_index=engine_index, scheduler_stats=0)

    def make_movable(self, request: Any) -> Any:
        return request

    def how_to_move(self, request: Any) -> Move:
        return Move(request.move)

    def continuation(self, request: Any, move: Move, produced: Sequence[int]) -> Any:
        prompt = request.prompt + list(produced) if move is Move.RESUME else request.prompt
        return msgspec.structs.replace(request, prompt=prompt)

    def trim_repeated(self, output: Any, repeated: int) -> None:
        output.new_token_ids = output.new_token_ids[repeated:]
        output.first = False

    def end_if_complete(self, request: Any, produced: Sequence[int], engine_index: int) -> Any | None:
        if not request.length or len(produced) < request.length:
            return None
        return FakeOutputs(engine_index, [FakeOutput(request.request_id, [], "length")])
