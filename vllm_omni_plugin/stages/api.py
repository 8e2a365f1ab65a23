"""Builds the requests of a Python stage, and reads its outputs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from vllm_omni_plugin.balancing import Prompt, Task
from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.logger import init_logger
from vllm_omni_plugin.pipeline import Stage, StageInput, StageOutput
from vllm_omni_plugin.pipeline.output_reader import OutputReader
from vllm_omni_plugin.pipeline.transfer import WHOLE, InputPart
from vllm_omni_plugin.stages.python_stage import PythonStage
from vllm_omni_plugin.vllm_api.codecs.stage_codec import sendable
from vllm_omni_plugin.vllm_api.codecs.stage_protocol import CONTENT_KEY, STOP, OutputContent, StageRequest
from vllm_omni_plugin.vllm_api.engine_messages.engine_types import Move
from vllm_omni_plugin.vllm_api.vllm_stages.stage_api import StageApi

logger = init_logger(__name__)

_MOST_TOKENS = 2**31
"""The largest cost of an input; sums of many costs are sent to other heads."""
_SENT = msgspec.msgpack.Decoder(tuple[list[int] | None, str | None, dict[str, Any], dict[str, Any]])


class PythonOutputReader(OutputReader):
    """Reads the outputs of a Python stage. A failed request has an `error`, and 400 (invalid) or 500 as `status`."""

    def _read(self, output: Any, ended: bool) -> StageOutput:
        fields = (output.kv_transfer_params or {}).get(CONTENT_KEY, {})
        content = msgspec.convert(fields, OutputContent)
        failure = {"error": content.error, "status": content.status} if content.error else {}
        return StageOutput(
            token_ids=content.token_ids,
            text=content.text,
            tensor=output.pooling_output,
            metadata=content.metadata | failure,
            finish_reason=str(output.finish_reason) if ended else None,
        )


class PythonStageApi(StageApi):
    """A Python stage.

    The outputs of a session are numbered: output n has n as its only token. So repeated outputs of a replay are
    recognized in the same way as repeated tokens. `decode` (thread-safe) makes text of the client's prompt, `encode`
    tokens of text, without special ones, for answers through vLLM's server; these end with `end_token`.
    """

    _wave: Mapping[str, int] = {}
    schedules = False

    def __init__(
        self,
        stage: Stage,
        decode: Callable[[Sequence[int]], str],
        encode: Callable[[str], Sequence[int]],
        end_token: int,
        cost: Callable[[StageInput], int] = PythonStage.cost,
    ) -> None:
        super().__init__()
        self._stage = stage
        self._decode = decode
        self._encode = encode
        self._end_token = end_token
        self._cost = cost
        self._warned = False

    def check_answerable(self, source: Any) -> None:
        params = source.sampling_params
        if params is not None and (params.logprobs is not None or params.prompt_logprobs is not None):
            raise StageInputError(f"Stage '{self._stage.name}': it is not a model and has no logprobs.")

    def build(
        self, source: Any, given: StageInput, sampling: Mapping[str, Any], *, for_client: bool, part: InputPart = WHOLE
    ) -> StageRequest:
        # The client's sampling parameters are not used: a Python stage does not sample.
        try:
            request = StageRequest(
                request_id=source.request_id,
                resumable=part.resumable,
                last=part.last,
                token_ids=None if given.token_ids is None else list(given.token_ids),
                text=given.text,
                tensor=None if given.tensor is None else sendable(given.tensor),
                metadata=dict(given.metadata),
                sampling={**self._stage.sampling, **given.sampling, **sampling},
                session_id=source.session_id,
            )
            # A stage drops a request that it cannot decode, and the client would wait for ever.
            _SENT.decode(msgspec.msgpack.encode((request.token_ids, request.text, request.metadata, request.sampling)))
        except Exception as error:  # torch raises many types
            raise StageInputError(f"Stage '{self._stage.name}': its input cannot be sent: {error}") from error
        return request

    def build_root(self, source: Any, sampling: Mapping[str, Any], *, for_client: bool) -> StageRequest:
        tokens = source.prompt_token_ids
        given = StageInput(tokens, "" if tokens is None else self._decode(tokens), source.prompt_embeds)
        part = InputPart(source.resumable, not source.resumable)
        return self.build(source, given, sampling, for_client=for_client, part=part)

    def build_end(self, source: Any) -> StageRequest:
        return StageRequest(request_id=source.request_id, closing=True)

    def session_tokens(self, chunk: Any) -> int:
        return 0

    def reader(self, request: Any) -> PythonOutputReader:
        return PythonOutputReader()

    def answer(self, output: Any, read: StageOutput) -> Any:
        tokens = list(read.token_ids or self._encode(read.text))
        if output.finish_reason == STOP:
            # vLLM's server takes the last token of a finished answer for its stop token, and does not show it.
            tokens.append(self._end_token)
        return msgspec.structs.replace(output, new_token_ids=tokens, pooling_output=None, kv_transfer_params=None)

    def describe(self, request: Any) -> tuple[Task, int | None]:
        task = Task(
            request_id=request.request_id,
            engine_inputs=request,
            sampling_params=None,
            prompt=Prompt(range(max(1, self._cost_of(request))), cacheable=False),
            session=request.session_id,
            max_tokens=1,
        )
        return task, None

    @property
    def cache_lease_s(self) -> float:
        raise NotImplementedError

    def with_kv_transfer(self, request: Any, params: Mapping[str, Any]) -> Any:
        raise NotImplementedError("a Python stage has no KV cache")

    def without_cache(self, request: Any) -> Any:
        raise NotImplementedError("a Python stage has no KV cache")

    def make_movable(self, request: Any) -> Any:
        return request

    def without_hand_over(self, request: Any) -> Any:
        return request

    def transfers_cache(self, request: Any) -> bool:
        return False

    def how_to_move(self, request: Any) -> Move:
        return Move.REPLAY

    def continuation(self, request: Any, move: Move, produced: Sequence[int]) -> Any:
        return request

    def end_if_complete(self, request: Any, produced: Sequence[int], engine_index: int) -> Any | None:
        # The last output always carries the end.
        return None

    def trim_repeated(self, output: Any, repeated: int) -> None:
        # The client has a repeated output already.
        if repeated:
            output.new_token_ids = []
            output.pooling_output = output.kv_transfer_params = None

    def _cost_of(self, request: StageRequest) -> int:
        """What an input costs, by the stage's own method; by its size if that fails."""
        given = StageInput(request.token_ids, request.text, request.tensor, request.metadata, request.sampling)
        try:
            cost = int(self._cost(given))
            if not 0 <= cost <= _MOST_TOKENS:
                raise ValueError(f"{cost} is not between 0 and {_MOST_TOKENS}")
        except BaseException as error:  # a user's method may raise anything, also SystemExit
            if not self._warned:
                self._warned = True
                logger.warning(
                    "%s.cost failed: %r. Inputs that it fails for count by their size. This is logged once.",
                    self._stage.engine,
                    error,
                )
            return PythonStage.cost(given)
        return cost
