"""Engines that take their next work from one queue: what an ideal head without any delay could do."""

from bisect import insort
from collections import deque
from collections.abc import Sequence
from heapq import heappop, heappush
from math import inf

from simulator.engine import LeapEngine
from simulator.requests import Request
from simulator.simulation import LINK_S
from vllm_omni_plugin.sim import EngineSettings

_LOOKED_AT = 40
"""Requests at the front of the queue that are tried for the rest of a step."""
_LONG_FIRST = 0.6
"""Seconds by which a request is moved forward for each second of its prefill, so that all end at about the same age.
0, 0.3 and 1 were worse under `bursty`."""

_Queue = list[tuple[float, int, Request]]


class _Engine(LeapEngine):
    def __init__(self, settings: EngineSettings, queue: _Queue, step_tokens: int, ahead: bool) -> None:
        super().__init__(settings)
        self._queue, self._step_tokens, self._ahead = queue, step_tokens, ahead

    @property
    def load(self) -> tuple[bool, int, int]:
        """Sort key: a request that need not wait goes to the engine with the lowest load."""
        return bool(self._chunks), self._to_compute(), self.running

    def has_room(self, prompt_tokens: int) -> bool:
        left = self._to_compute()
        if not self._ahead:
            return not self._chunks and not left
        return not left or left + prompt_tokens <= self._step_tokens

    def _begin(self, now: float) -> None:
        self._chunks = []
        if not self._ahead:
            self._fill_step()
        super()._begin(now)
        if self._ahead:
            self._fill_step()

    def _fill_step(self) -> None:
        """Fill a step from the queue. A prompt that does not fit into the rest of a step waits for its own step."""
        left, queue = self._to_compute(), self._queue
        while queue and left < self._step_tokens:
            room = self._step_tokens - left
            fit = (index for index, each in enumerate(queue[:_LOOKED_AT]) if each[-1].prompt_tokens <= room)
            index = next(fit, None) if left else 0
            if index is None:
                return
            request = queue.pop(index)[-1]
            self._waiting.append(request.job(self.settings.block_size))
            left += request.prompt_tokens

    def _to_compute(self) -> int:
        """Prompt tokens after the current step."""
        prefilling = sum(job.prompt_tokens - job.computed for job in self._prefilling)
        return prefilling - sum(tokens for _, tokens in self._chunks) + sum(job.prompt_tokens for job in self._waiting)


class OneQueue:
    """One queue in front of all engines. Only a request and its first token have a link latency.

    Args:
        step_tokens: prompt tokens of a full step; limited so that long prompts do not delay short ones.
        ahead: whether a step is filled when the step before it starts, as a real head must do to keep engines busy.
    """

    def __init__(self, settings: EngineSettings, replicas: int, step_tokens: int, ahead: bool) -> None:
        self._queue: _Queue = []
        self._settings = settings
        self._engines = [_Engine(settings, self._queue, step_tokens, ahead) for _ in range(replicas)]

    def run(self, requests: Sequence[Request]) -> list[float]:
        """Seconds to the first token of each request. They must be in order of arrival; no two share a prefix."""
        ttfts: list[float] = []
        steps: list[tuple[float, int]] = []
        coming = deque(requests)
        while coming or steps:
            if coming and (not steps or coming[0].arrived + LINK_S < steps[0][0]):
                request = coming.popleft()
                number = self._arrive(request, request.arrived + LINK_S)
            else:
                now, number = heappop(steps)
                # A later arrival may have shortened the leap.
                if now == self._engines[number].next_time:
                    ttfts += [now + LINK_S - job.request.arrived for job in self._engines[number].step().began]
            if number is not None and self._engines[number].next_time < inf:
                heappush(steps, (self._engines[number].next_time, number))
        assert len(ttfts) == len(requests)
        return ttfts

    def _arrive(self, request: Request, now: float) -> int | None:
        """Returns the number of the engine that gets the request; None if it waits."""
        takers = [number for number, engine in enumerate(self._engines) if engine.has_room(request.prompt_tokens)]
        if not takers:
            urgency = request.arrived - _LONG_FIRST * self._settings.prefill_token_s * request.prompt_tokens
            insort(self._queue, (urgency, request.number, request))
            return None
        number = min(takers, key=lambda number: self._engines[number].load)
        self._engines[number].submit(request.job(self._settings.block_size), now)
        return number
