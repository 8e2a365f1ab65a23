"""What the orchestrator asks about requests and outputs, whose structs are vLLM's."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from vllm_omni_plugin.balancing import Task
from vllm_omni_plugin.pipeline.output_reader import OutputReader
from vllm_omni_plugin.pipeline.transfer import WHOLE, Part, StageInput, StageOutput
from vllm_omni_plugin.vllm_api.requests.facts import CacheSize, LoadReport
from vllm_omni_plugin.vllm_api.requests.move import Move


class RequestApi(Protocol):
    """Reads and rebuilds requests and outputs; `vllm_api.requests.engine_api.EngineApi` in service."""

    @property
    def pooling_task(self) -> str | None:
        """What all requests ask their pooling model for; an engine that does not know it dies of it. None: it varies,
        and vLLM's server has checked it."""

    @property
    def vocabulary(self) -> int | None:
        """Ids of the model's tokens are below this; None: it is not known."""

    def describe(self, request: Any) -> tuple[Task, int | None]:
        """What policies may know of a request, or of an attempt to go on with it, and the key that binds it.

        Requests with the same key go to the same replica; None: any will do.
        """

    def cached_tokens(self, output: Any) -> int | None:
        """Prompt tokens that the engine took from its cache, told with the first output; None if it does not say."""

    def load_report(self, outputs: Any) -> LoadReport | None:
        """What the engine reports of its load with a message, None if it does not."""

    def cache_size(self, ready_response: bytes) -> CacheSize:
        """What an engine said of its KV memory when it was ready. Raises `WireError` if it cannot be read."""

    def cut_short(self, output: Any) -> bool: ...

    def aborted(self, output: Any) -> bool:
        """Whether the engine has ended the request because it was paused or put to sleep."""

    def refused(self, output: Any) -> bool:
        """Whether the engine has not taken the request, because an operator has paused it."""

    def fetches_once(self, request: Any) -> bool:
        """Whether the request names a cache of another engine, kept until it has been fetched or refused once."""

    def idle_report(self, engine_index: int) -> Any: ...

    def movable(self, request: Any) -> Any:
        """The request, or a copy with a seed where only that makes its answer repeatable."""

    def how_to_move(self, request: Any) -> Move:
        """How the request goes on elsewhere once part of its answer has been delivered."""

    def moved(self, request: Any, move: Move, produced: Sequence[int]) -> Any:
        """What to send to the next replica, given the tokens delivered so far. The request itself is not changed."""

    def fit(self, output: Any, swallow: int) -> None:
        """Make a moved request's first output one in the middle: without its first tokens and what is told once."""

    def end(self, request_id: str) -> Any:
        """Outputs that end a request of which nothing is to come."""

    def restate_cached(self, output: Any, cached_tokens: int) -> None:
        """Let a first output say that so many of the prompt's tokens were cached."""

    def missing_end(self, request: Any, produced: Sequence[int], engine_index: int) -> Any | None:
        """Outputs that end a request whose tokens have all been delivered; None while some are to come."""


class StageApi(RequestApi, Protocol):
    """What it asks about one stage of a pipeline beyond that: requests built, outputs read."""

    def check_front(self, source: Any) -> None:
        """Check that the stage can answer a client's request through vLLM's server.

        Raises:
            StageInputError: answers would lack what the request asks for; worded for the client.
        """

    def build(
        self, source: Any, given: StageInput, sampling: Mapping[str, Any], *, front: bool, part: Part = WHOLE
    ) -> Any:
        """The engine request of this stage. Runs on a thread of the stage's, and may tokenise.

        Args:
            source: vLLM's `EngineCoreRequest` as the client submitted it: its id, arrival time, priority, trace
                headers, session and cache salt carry over.
            given: what the transform returned.
            sampling: what the request has for this stage by the stage's name, over the stage's own and the transform's.
            front: whether this stage answers the client: then the client's own sampling parameters apply, read anew
                for this stage's tokenizer, with `max_tokens` bounded by the room that the prompt leaves.
            part: which part of its input this is.

        Raises:
            StageInputError: the input is not one that the stage can take; worded for the client.
        """

    def build_root(self, source: Any, sampling: Mapping[str, Any], *, front: bool) -> Any:
        """The engine request of a stage without inputs, made from the client's; see `build`.

        For the stage whose model made the prompt it is the client's request, with the stage's sampling parameters
        unless it is the front stage; any other stage gets the prompt's text. A stage that puts out a KV cache only
        computes the prompt and leaves the cache to its KV connector.
        """

    def build_end(self, source: Any) -> Any:
        """What closes the input of a streaming-input session."""

    def session_tokens(self, chunk: Any) -> int:
        """Tokens that a chunk and the answer to it add to their session at most."""

    def reader(self, request: Any) -> OutputReader:
        """A reader for the run that begins with this request."""

    def answer(self, output: Any, read: StageOutput) -> Any:
        """The output for vLLM's server, of the stage that answers: the `EngineCoreOutput` itself, or one made of it.

        Args:
            output: of the engine, under the client's id.
            read: what the reader made of it.
        """

    def with_kv_transfer(self, request: Any, params: Mapping[str, Any]) -> Any:
        """A request of a decode stage with the `kv_transfer_params` that the prefill stage put out.

        Only for stages that vLLM runs.
        """
