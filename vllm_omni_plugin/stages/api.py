"""What the orchestrator asks about a Python stage: its requests built, moved and counted, its outputs read."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.pipeline.stage import Stage
from vllm_omni_plugin.pipeline.transfer import StageInput, StageOutput
from vllm_omni_plugin.stages.reader import PythonOutputReader
from vllm_omni_plugin.vllm_api.engine_api import EngineApi
from vllm_omni_plugin.vllm_api.facts import RequestFacts
from vllm_omni_plugin.vllm_api.move import Move
from vllm_omni_plugin.vllm_api.stage_codec import sendable
from vllm_omni_plugin.vllm_api.stage_protocol import STOP, StageRequest


class PythonStageApi(EngineApi):
    """Satisfies `orchestrator.stage_api.StageApi` and `replicas.stage_client.Codec`.

    Outputs are numbered through all of a session: that of number n has n as its only token. So a request that is
    computed again by another replica is joined to what was delivered as an answer of tokens is.

    Args:
        stage: of the pipeline's file.
        decode: text of tokens of the client's prompt; may be called on several threads.
        encode: tokens of text for vLLM's server to answer with, if this stage answers through it; without the special
            tokens that begin or end a prompt.
        end_token: the token that ends an answer of theirs.
    """

    def __init__(
        self,
        stage: Stage,
        decode: Callable[[Sequence[int]], str],
        encode: Callable[[str], Sequence[int]],
        end_token: int,
    ) -> None:
        super().__init__()
        self._stage = stage
        self._decode = decode
        self._encode = encode
        self._end_token = end_token

    def check_front(self, source: Any) -> None:
        """There are no probabilities of its tokens."""
        params = source.sampling_params
        if params is not None and (params.logprobs is not None or params.prompt_logprobs is not None):
            raise StageInputError(f"Stage '{self._stage.name}': what answers is no model, and gives no logprobs.")

    def attempt(self, request: Any, engine_request_id: str, client_index: int) -> StageRequest:
        """There are no waves of a Python stage."""
        attempt: StageRequest = msgspec.structs.replace(
            request, request_id=engine_request_id, client_index=client_index
        )
        return attempt

    def build(
        self,
        source: Any,
        given: StageInput,
        sampling: Mapping[str, Any],
        *,
        front: bool,
        resumable: bool,
        last: bool,
        held: int = 0,
    ) -> StageRequest:
        """A stage of Python does not sample: the client's own parameters mean nothing to it.

        Raises:
            StageInputError: something of the input cannot be sent.
        """
        try:
            request = StageRequest(
                request_id=source.request_id,
                resumable=resumable,
                last=last,
                token_ids=None if given.token_ids is None else list(given.token_ids),
                text=given.text,
                tensor=None if given.tensor is None else sendable(given.tensor),
                metadata=dict(given.metadata),
                sampling={**self._stage.sampling, **given.sampling, **sampling},
                session_id=source.session_id,
            )
            msgspec.msgpack.encode((request.token_ids, request.metadata, request.sampling))
        except Exception as error:  # what torch says of tensors is of many kinds
            raise StageInputError(f"Stage '{self._stage.name}': its input cannot be sent: {error}") from error
        return request

    def build_root(self, source: Any, sampling: Mapping[str, Any], *, front: bool) -> StageRequest:
        """It gets tokens and text of the prompt."""
        tokens = source.prompt_token_ids
        given = StageInput(tokens, "" if tokens is None else self._decode(tokens), source.prompt_embeds)
        return self.build(source, given, sampling, front=front, resumable=source.resumable, last=not source.resumable)

    def build_end(self, source: Any) -> StageRequest:
        return StageRequest(request_id=source.request_id, closing=True)

    def session_tokens(self, chunk: Any) -> int:
        """What a chunk adds to the tokens that an engine holds for its session: none, there is no such limit here."""
        return 0

    def reader(self, request: Any) -> PythonOutputReader:
        return PythonOutputReader()

    def answer(self, output: Any, read: StageOutput) -> Any:
        """The tokens that the stage gave, else those of its text."""
        tokens = list(read.token_ids or self._encode(read.text))
        if output.finish_reason == STOP:
            # The server takes the last token of an answer that has come to its end for that end, and does not show it.
            tokens.append(self._end_token)
        return msgspec.structs.replace(output, new_token_ids=tokens, pooling_output=None, kv_transfer_params=None)

    def describe(self, request: Any) -> RequestFacts:
        """The size of the work; there is no cache to hit."""
        rows = 0 if request.tensor is None or not request.tensor.shape else request.tensor.shape[0]
        size = len(request.token_ids or ()) or len(request.text or "") or rows
        return RequestFacts(range(max(1, size)), cacheable=False, session=request.session_id, max_tokens=1)

    def affinity_key(self, request: Any) -> int | None:
        """Any replica will do."""
        return None

    def movable(self, request: Any) -> Any:
        """It is as it stands: stages are deterministic."""
        return request

    def how_to_move(self, request: Any) -> Move:
        """From its start."""
        return Move.REPLAY

    def moved(self, request: Any, move: Move, produced: Sequence[int]) -> Any:
        """The request itself."""
        return request

    def missing_end(self, request: Any, produced: Sequence[int], engine_index: int) -> Any | None:
        """None: the end comes with the last output."""
        return None

    def fit(self, output: Any, swallow: int) -> None:
        """An output that was delivered before carries nothing."""
        if swallow:
            output.new_token_ids = []
            output.pooling_output = output.kv_transfer_params = None
