"""Interface to the requests and outputs of one stage of a pipeline."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from vllm_omni_plugin.pipeline import StageInput, StageOutput
from vllm_omni_plugin.pipeline.output_reader import OutputReader
from vllm_omni_plugin.pipeline.transfer import WHOLE, InputPart
from vllm_omni_plugin.vllm_api.engine_messages.engine_api import EngineApi


class StageApi(EngineApi, ABC):
    """Builds the requests and reads the outputs of one stage, of vLLM's engines or of a Python class."""

    @abstractmethod
    def check_answerable(self, source: Any) -> None:
        """Raises StageInputError, with a text for the client, if the stage cannot give what the request asks for."""

    @abstractmethod
    def build(
        self, source: Any, given: StageInput, sampling: Mapping[str, Any], *, for_client: bool, part: InputPart = WHOLE
    ) -> Any:
        """Build the engine request of this stage. Runs on a thread of the stage, and may tokenize.

        The id, arrival time, priority, trace headers, session and cache salt are those of the client's request,
        `source`. The request's parameters for this stage, `sampling`, override those of the transform, which override
        those of the stage. If the stage answers the client, the client's own apply, adapted to this stage's tokenizer,
        with `max_tokens` limited by the length of the prompt.
        Raises StageInputError, with a text for the client, if the stage cannot take the input.
        """

    @abstractmethod
    def build_root(self, source: Any, sampling: Mapping[str, Any], *, for_client: bool) -> Any:
        """Build the engine request of a stage without inputs from the client's request; see `build`.

        The stage whose tokenizer made the prompt gets the client's request, with the stage's sampling parameters unless
        `for_client`. Any other stage gets the prompt's text. A stage with the output `kv_cache` only computes the
        prompt; its KV connector transfers the cache.
        """

    @abstractmethod
    def build_end(self, source: Any) -> Any:
        """Build the request that ends the input of a streaming-input session."""

    @abstractmethod
    def session_tokens(self, chunk: Any) -> int:
        """Tokens that a chunk and its answer add to their session at most."""

    @abstractmethod
    def reader(self, request: Any) -> OutputReader:
        """A reader for the outputs of the run that starts with this request."""

    @abstractmethod
    def answer(self, output: Any, read: StageOutput) -> Any:
        """The `EngineCoreOutput` for vLLM's server, made of the engine's output and what the reader read from it."""

    @property
    @abstractmethod
    def cache_lease_s(self) -> float:
        """Seconds within which decode must ask a prefill stage's engine for a cache. Not for Python stages."""

    @abstractmethod
    def with_kv_transfer(self, request: Any, params: Mapping[str, Any]) -> Any:
        """A copy of a decode stage's request with the prefill stage's `kv_transfer_params`. Not for Python stages."""

    def release(self, request_id: str, params: Mapping[str, Any]) -> Any | None:
        """A request by which a decode's engine has a prefill's engine free a cache, or None if that keeps it for
        nobody."""
        return None

    @abstractmethod
    def without_cache(self, request: Any) -> Any:
        """A copy of a decode stage's request that makes its engine compute the whole prompt. Not for Python stages."""
