"""Reading the outputs of a Python stage."""

from typing import Any

import msgspec

from vllm_omni_plugin.pipeline.transfer import StageOutput
from vllm_omni_plugin.vllm_api.joining import joined
from vllm_omni_plugin.vllm_api.stage_protocol import CONTENT_KEY, Content


class PythonOutputReader:
    """Satisfies `orchestrator.stage_api.OutputReader`.

    Of a request that failed, the metadata has `error`, the text for the client, and `status`, 400 if the request is at
    fault and 500 if the stage is.
    """

    def __init__(self) -> None:
        self._outputs: list[StageOutput] = []

    def read(self, output: Any, ended: bool) -> StageOutput:
        fields = (output.kv_transfer_params or {}).get(CONTENT_KEY, {})
        content = msgspec.convert(fields, Content)
        failure = {"error": content.error, "status": content.status} if content.error else {}
        read = StageOutput(
            token_ids=content.token_ids,
            text=content.text,
            tensor=output.pooling_output,
            metadata=content.metadata | failure,
            finish_reason=str(output.finish_reason) if ended else None,
        )
        self._outputs.append(read)
        return read

    @property
    def whole(self) -> StageOutput:
        return joined(self._outputs) if self._outputs else StageOutput()
