"""Stages of a pipeline without vLLM: builds requests, reads outputs, and plays an engine that answers by a rule."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from tests.fakes.engine_api import FakeEngineApi, FakeOutput, FakeOutputs, FakeRequest
from tests.fakes.links import FakeLink
from vllm_omni_plugin.errors import StageInputError
from vllm_omni_plugin.pipeline import Modality, Stage, StageInput, StageOutput
from vllm_omni_plugin.pipeline.output_reader import OutputReader
from vllm_omni_plugin.pipeline.transfer import WHOLE, InputPart

LEASE_S = 15.0
"""Seconds within which a decode must ask for the cache of its prefill."""
ROOM = 1000
"""Longest input of a stage, in tokens."""


class FakeReader(OutputReader):
    """Text is one letter for each token."""

    def __init__(self, request: FakeRequest) -> None:
        super().__init__()
        self._stop = request.stop

    def _read(self, output: Any, ended: bool) -> StageOutput:
        tokens = list(output.new_token_ids)
        stops = self._stop in tokens
        if stops:
            tokens = tokens[: tokens.index(self._stop)]
        text = "".join(chr(ord("a") + token % 26) for token in tokens)
        told = output.kv_transfer_params or {}
        reason = "stop" if stops else str(output.finish_reason) if ended else None
        return StageOutput(tokens, text, metadata=told, finish_reason=reason)


class FakeStageApi(FakeEngineApi):
    """Implements `StageApi`. `faults` has errors by the name of the method that raises them."""

    cache_lease_s = LEASE_S

    def __init__(self, stage: Stage) -> None:
        self.faults: dict[str, BaseException] = {}
        self.held: list[int] = []
        self._stage = stage

    def check_answerable(self, source: Any) -> None:
        self._stumble("check_answerable")

    def build(
        self,
        source: Any,
        given: StageInput,
        sampling: Mapping[str, Any],
        *,
        for_client: bool,
        part: InputPart = WHOLE,
    ) -> Any:
        self._stumble("build")
        self.held.append(part.tokens_before)
        tokens = list(given.token_ids or map(ord, given.text or ""))
        if len(tokens) > ROOM:
            raise StageInputError(f"Stage {self._stage.name!r}: the input is too long")
        return self._made(source, sampling, for_client, prompt=tokens, resumable=part.resumable)

    def build_root(self, source: Any, sampling: Mapping[str, Any], *, for_client: bool) -> Any:
        self._stumble("build_root")
        request = self._made(source, sampling, for_client)
        return msgspec.structs.replace(request, length=1) if self._stage.output is Modality.KV_CACHE else request

    def build_end(self, source: Any) -> Any:
        return FakeRequest(source.request_id)

    def session_tokens(self, chunk: Any) -> int:
        return len(chunk.prompt) + 4

    def with_kv_transfer(self, request: Any, params: Mapping[str, Any]) -> Any:
        return msgspec.structs.replace(request, sampling_params={**request.sampling_params, "kv": params})

    def release(self, request_id: str, params: Mapping[str, Any]) -> Any:
        return FakeRequest(request_id, sampling_params={"kv": params}, abort_immediately=True)

    def without_cache(self, request: Any) -> Any:
        return msgspec.structs.replace(request, sampling_params={**request.sampling_params, "cache": False})

    def reader(self, request: Any) -> Any:
        self._stumble("reader")
        return _Stumbling(self, request) if "read" in self.faults else FakeReader(request)

    def answer(self, output: Any, read: StageOutput) -> Any:
        self._stumble("answer")
        return output

    def end(self, request_id: str) -> Any:
        return FakeOutputs(outputs=[FakeOutput(request_id, [], "stop")])

    def set_cached_tokens(self, output: Any, cached_tokens: int) -> None:
        if output.cached is not None:
            output.cached = cached_tokens

    def _made(self, source: Any, sampling: Mapping[str, Any], for_client: bool, **fields: Any) -> Any:
        params = {**sampling, "stage": self._stage.name, "for_client": for_client}
        return msgspec.structs.replace(source, sampling_params=params, **fields)

    def _stumble(self, method: str) -> None:
        if method in self.faults:
            raise self.faults[method]


class _Stumbling(FakeReader):
    def __init__(self, api: FakeStageApi, request: Any) -> None:
        super().__init__(request)
        self._error = api.faults["read"]

    def _read(self, output: Any, ended: bool) -> StageOutput:
        raise self._error


@dataclass
class Played:
    """One attempt of a request on a played engine."""

    seen: list[int] = field(default_factory=list)
    turns: deque[int] = field(default_factory=deque)
    open: bool = True
    said: int = 0
    numbered: int = 0


class PlayedLink(FakeLink):
    """A link whose engine answers each turn with tokens computed from all input so far.

    Attributes:
        python: the engine is a Python stage, which gives one numbered output for each turn.
        attempts: running attempts by engine-side id.
        requests: all requests, in order.
    """

    def __init__(self, name: str, python: bool = False) -> None:
        super().__init__(name)
        self.python = python
        self.attempts: dict[str, Played] = {}
        self.requests: list[dict[str, Any]] = []

    def send(self, frames: Sequence[Any]) -> None:
        super().send(frames)
        body = msgspec.json.decode(frames[1])
        if frames[0] == b"abort":
            for name in body:
                self.attempts.pop(name, None)
        elif frames[0] == b"add":
            self.requests.append(body)
            self._add(body)

    def chunks(self, engine_request_id: str) -> list[list[int]]:
        """The chunks of a session that were sent, without its end."""
        sent = [body for body in self.requests if body["request_id"] == engine_request_id]
        return [body["prompt"] for body in sent if body["resumable"]]

    def step(self, engine_request_id: str, count: int = 1) -> None:
        """Send `count` tokens of the current turn, or the rest of it."""
        attempt = self.attempts[engine_request_id]
        if not attempt.turns:
            return
        answer = self._answer(attempt)
        new = answer[attempt.said : attempt.said + count]
        attempt.said += len(new)
        finish = attempt.said == len(answer)
        if finish:
            attempt.turns.popleft()
            attempt.said = 0
            attempt.numbered += 1
            if not attempt.open and not attempt.turns:
                del self.attempts[engine_request_id]
        self.output(engine_request_id, *new, finish_reason="stop" if finish else None)

    def left(self, engine_request_id: str) -> int:
        """Tokens of the current turn that are still to come."""
        attempt = self.attempts[engine_request_id]
        return len(self._answer(attempt)) - attempt.said

    def tell(self, engine_request_id: str, *tokens: int, finish_reason: str | None = None, **fields: Any) -> None:
        """Send an output with tokens chosen by the test."""
        self.say(
            msgspec.json.encode(
                FakeOutputs(outputs=[FakeOutput(engine_request_id, list(tokens), finish_reason, **fields)])
            )
        )

    def _add(self, body: dict[str, Any]) -> None:
        attempt = self.attempts.get(body["request_id"])
        if attempt is None:
            attempt = self.attempts[body["request_id"]] = Played()
        elif not body["resumable"]:
            attempt.open = False
            if not attempt.turns:
                del self.attempts[body["request_id"]]
            return
        attempt.open = body["resumable"]
        attempt.seen += body["prompt"]
        attempt.turns.append(len(attempt.seen))

    def _answer(self, attempt: Played) -> list[int]:
        if self.python:
            return [attempt.numbered]
        seed = sum(attempt.seen[: attempt.turns[0]]) + 5 * attempt.numbered
        return [(seed + 3 * place) % 25 + 1 for place in range(1 + seed % 4)]
