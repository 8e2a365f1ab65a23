"""What is asked about one stage of a pipeline beyond an engine's protocol: requests built, outputs read."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from vllm_omni_plugin.pipeline.output_reader import OutputReader
from vllm_omni_plugin.pipeline.transfer import WHOLE, InputPart, StageInput, StageOutput
from vllm_omni_plugin.vllm_api.requests.engine_api import EngineApi


class StageApi(EngineApi, ABC):
    """The requests and outputs of one stage, which vLLM's engines run or a module of Python."""

    @abstractmethod
    def check_answerable(self, source: Any) -> None:
        """Check that the stage can answer a client's request through vLLM's server.

        Raises:
            StageInputError: answers would lack what the request asks for; worded for the client.
        """

    @abstractmethod
    def build(
        self,
        source: Any,
        given: StageInput,
        sampling: Mapping[str, Any],
        *,
        for_client: bool,
        part: InputPart = WHOLE,
    ) -> Any:
        """The engine request of this stage. Runs on a thread of the stage's, and may tokenise.

        Args:
            source: vLLM's `EngineCoreRequest` as the client submitted it: its id, arrival time, priority, trace
                headers, session and cache salt carry over.
            given: what the transform returned.
            sampling: what the request has for this stage by the stage's name, over the stage's own and the transform's.
            for_client: whether this stage answers the client: then the client's own sampling parameters apply, read
                anew for this stage's tokenizer, with `max_tokens` bounded by the room that the prompt leaves.
            part: which part of its input this is.

        Raises:
            StageInputError: the input is not one that the stage can take; worded for the client.
        """

    @abstractmethod
    def build_root(self, source: Any, sampling: Mapping[str, Any], *, for_client: bool) -> Any:
        """The engine request of a stage without inputs, made from the client's; see `build`.

        For the stage whose model made the prompt it is the client's request, with the stage's sampling parameters
        unless `for_client`; any other gets the prompt's text. A stage that puts out a KV cache only
        computes the prompt and leaves the cache to its KV connector.
        """

    @abstractmethod
    def build_end(self, source: Any) -> Any:
        """What closes the input of a streaming-input session."""

    @abstractmethod
    def session_tokens(self, chunk: Any) -> int:
        """Tokens that a chunk and the answer to it add to their session at most."""

    @abstractmethod
    def reader(self, request: Any) -> OutputReader:
        """A reader for the run that begins with this request."""

    @abstractmethod
    def answer(self, output: Any, read: StageOutput) -> Any:
        """The output for vLLM's server, of the stage that answers: the `EngineCoreOutput` itself, or one made of it.

        Args:
            output: of the engine, under the client's id.
            read: what the reader made of it.
        """

    @abstractmethod
    def with_kv_transfer(self, request: Any, params: Mapping[str, Any]) -> Any:
        """A request of a decode stage with the `kv_transfer_params` that the prefill stage put out.

        Only for stages that vLLM runs.
        """
