"""Reading the outputs of a stage of vLLM's engines."""

from typing import Any

from vllm.v1.engine import FinishReason
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from vllm_omni_plugin.pipeline.output_reader import OutputReader
from vllm_omni_plugin.pipeline.transfer import StageOutput
from vllm_omni_plugin.vllm_api.stages.stage_params import KV_TRANSFER_PARAMS


class TokenReader(OutputReader):
    """Reads tokens and tensors as they come.

    A stop token is not among the tokens, as it is not in the text, unless the request wants it there.
    """

    def __init__(self, request: Any) -> None:
        super().__init__()
        params = request.sampling_params
        self._keeps_stop = params is None or params.include_stop_str_in_output

    def _read(self, output: Any, ended: bool) -> StageOutput:
        reason = output.finish_reason if ended else None
        token_ids = output.new_token_ids
        if self._at_stop_token(output) and not self._keeps_stop:
            token_ids = token_ids[:-1]
        return StageOutput(
            token_ids=token_ids,
            tensor=output.pooling_output,
            metadata=_metadata(output),
            finish_reason=None if reason is None else str(reason),
        )

    def _at_stop_token(self, output: Any) -> bool:
        return bool(output.new_token_ids) and output.finish_reason == FinishReason.STOP


class TextReader(TokenReader):
    """Reads text as vLLM's server makes it of tokens, stop strings included."""

    def __init__(self, request: Any, tokenizer: Any) -> None:
        super().__init__(request)
        self._detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)

    def _read(self, output: Any, ended: bool) -> StageOutput:
        detokenizer = self._detokenizer
        before = detokenizer.num_output_tokens()
        stop_string = detokenizer.update(output.new_token_ids, output.finish_reason == FinishReason.STOP)
        token_ids = detokenizer.output_token_ids[before:]
        if self._at_stop_token(output) and stop_string is None and not self._keeps_stop:
            token_ids = token_ids[:-1]
        reason = FinishReason.STOP if stop_string is not None else output.finish_reason if ended else None
        return StageOutput(
            token_ids=token_ids,
            text=detokenizer.get_next_output_text(reason is not None, delta=True),
            metadata=_metadata(output),
            finish_reason=None if reason is None else str(reason),
        )


def _metadata(output: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    if output.prefill_stats is not None:
        metadata["cached_tokens"] = output.prefill_stats.num_cached_tokens
    if output.kv_transfer_params is not None:
        metadata[KV_TRANSFER_PARAMS] = output.kv_transfer_params
    return metadata
