"""An executor without a model whose engine dies of one prompt. All processes of a server under test find it here."""

import os
import signal
from collections.abc import Mapping
from typing import Any

from tests.fakes.sleeping_executor import Iteration, SleepingExecutor


class DeadlyExecutor(SleepingExecutor):
    """A `SleepingExecutor` that SIGILL ends once it has computed the `deadly_prompt` of `--additional-config`."""

    def new_model(self, vllm_config: Any) -> Any:
        return _DeadlyModel(super().new_model(vllm_config), vllm_config.additional_config["deadly_prompt"])


class _DeadlyModel:
    def __init__(self, model: Any, deadly_prompt: list[int]) -> None:
        self.kv_blocks = model.kv_blocks
        self._model = model
        self._deadly_prompt = deadly_prompt

    def compute(self, iteration: Iteration) -> Mapping[str, int]:
        tokens: Mapping[str, int] = self._model.compute(iteration)
        if any(new.prompt_token_ids == self._deadly_prompt for new in iteration.started):
            os.kill(os.getpid(), signal.SIGILL)
        return tokens

    def compute_nothing(self) -> None:
        self._model.compute_nothing()
