"""What an engine without a model does in an iteration: how long it takes and which tokens come of it."""

from collections.abc import Callable, Mapping
from typing import Any

from vllm_omni_plugin.errors import ConfigError
from vllm_omni_plugin.sim.model.engine_settings import EngineSettings
from vllm_omni_plugin.sim.model.sequence import Sequence
from vllm_omni_plugin.sim.model.sim_requests import from_scheduler
from vllm_omni_plugin.vllm_api.launch.function_executor import Iteration

_KEY = "sleeping_executor"
_SERVICE_TIMES = ("step_s", "prefill_token_s", "sequence_s")
_LONGEST_S = 60.0


def read_service_times(additional_config: Any) -> dict[str, float]:
    """The service times among the fields of `EngineSettings` that vLLM's `--additional-config` gives.

    Args:
        additional_config: what it holds; the times are under `sleeping_executor`, in seconds, each 0 to 60.

    Raises:
        ConfigError: naming what is unknown or out of range.
    """
    given = additional_config.get(_KEY, {}) if isinstance(additional_config, dict) else {}
    where = f"--additional-config: {_KEY}"
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is {given!r}; it must be an object with {', '.join(_SERVICE_TIMES)}")
    for name, value in given.items():
        if name not in _SERVICE_TIMES:
            raise ConfigError(f"{where}.{name} is unknown; there are {', '.join(_SERVICE_TIMES)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LONGEST_S:
            raise ConfigError(f"{where}.{name} is {value!r}; it must be seconds, 0 to {_LONGEST_S:g}")
    return given


class SleepingModel:
    """What a `ModelFreeExecutor` computes with: the linear model of `EngineSettings`."""

    def __init__(self, settings: EngineSettings, sleep: Callable[[float], None]) -> None:
        self.kv_blocks = settings.kv_blocks
        self._settings = settings
        self._sleep = sleep
        self._sequences: dict[str, Sequence] = {}

    def compute(self, iteration: Iteration) -> Mapping[str, int]:
        """Sleep as long as the iteration takes; returns the next token of each sequence that is computed to its end."""
        self._update(iteration)
        if iteration.tokens:
            self._sleep(self._duration(iteration))
        return self._next_tokens(iteration)

    def compute_nothing(self) -> None:
        """Sleep as long as an iteration takes at least."""
        self._sleep(self._settings.duration(0, 0))

    def _update(self, iteration: Iteration) -> None:
        for request_id in iteration.ended:
            self._sequences.pop(request_id, None)
        for new in iteration.started:
            known = self._sequences.get(new.req_id)
            # A preempted request may come back as a new one, with the tokens it has produced in front of it.
            if known is None or known.request.prompt != new.prompt_token_ids:
                self._sequences[new.req_id] = Sequence(from_scheduler(new), self._settings, queued_at=0.0)

    def _duration(self, iteration: Iteration) -> float:
        prefill_tokens = decoding = 0
        for request_id, tokens in iteration.tokens.items():
            sequence = self._sequences[request_id]
            sequence.computed = iteration.computed[request_id]
            if sequence.decoding:
                decoding += 1
            else:
                prefill_tokens += tokens
        return self._settings.duration(prefill_tokens, decoding)

    def _next_tokens(self, iteration: Iteration) -> dict[str, int]:
        next_tokens: dict[str, int] = {}
        for request_id, tokens in iteration.tokens.items():
            sequence = self._sequences[request_id]
            sequence.computed += tokens
            if sequence.pending == 0:
                token = sequence.next_output().token
                assert token is not None
                next_tokens[request_id] = token
        return next_tokens
