"""A simulated engine without sockets, threads or a clock: continuous batching in iterations of computed duration."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from vllm_omni_plugin.sim.model.engine_settings import EngineSettings
from vllm_omni_plugin.sim.model.kv_cache import KVCache
from vllm_omni_plugin.sim.model.sequence import SimSequence
from vllm_omni_plugin.sim.model.sim_requests import SimOutput, SimRequest


@dataclass(frozen=True, slots=True)
class IterationReport:
    """The load after an iteration: `kv_cache_usage` is a share, 0 to 1; the last three count since the last report."""

    running: int
    waiting: int
    kv_cache_usage: float
    admitted: int = 0
    queried_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """The result of a step: outputs and report of an iteration that ended, if any, and the time of the next step.

    `next_time` is None if the next step is due only after the next request or resume.
    """

    outputs: list[SimOutput]
    next_time: float | None
    report: IterationReport | None = None


class EngineModel:
    """Batches requests as vLLM's scheduler does: running sequences first, then waiting ones in order.

    Source: continuous batching (Yu et al., "Orca", OSDI 2022) with chunked prefill (Agrawal et al., "Sarathi-Serve",
    OSDI 2024). A pure function of its calls: the caller gives the time. Waiting requests start only while `admitting`,
    iterations only while `scheduling`.
    """

    def __init__(self, settings: EngineSettings) -> None:
        self.settings = settings
        self.admitting = True
        self.scheduling = True
        self._cache = KVCache(settings.kv_blocks)
        self._waiting: OrderedDict[str, SimSequence] = OrderedDict()
        self._running: dict[str, SimSequence] = {}
        self._batch: dict[str, int] = {}
        self._batch_ends: float | None = None
        self._admitted = self._queried_tokens = self._cached_tokens = 0

    def submit(self, request: SimRequest, now: float) -> None:
        """Queue a request for the next iteration.

        Raises KeyError for an id that the engine has, of which vLLM's would die, ValueError for an empty or too long
        prompt, OverflowError for a token id above 32 bits.
        """
        if request.request_id in self:
            raise KeyError(request.request_id)
        self._waiting[request.request_id] = SimSequence(request, self.settings, now)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests, without outputs; unknown ids are ignored."""
        for request_id in request_ids:
            self._waiting.pop(request_id, None)
            self._end(request_id)

    def step(self, now: float) -> Step:
        """End the iteration that is due and start the next one; `now` is in seconds of a monotonic clock."""
        outputs: list[SimOutput] = []
        report = None
        if self._batch_ends is not None and now >= self._batch_ends:
            outputs = self._end_iteration()
            report = self._report()
        if self._batch_ends is None and self.scheduling:
            self._begin_iteration(now)
        return Step(outputs, self._batch_ends, report)

    def reset_prefix_cache(self) -> bool:
        """Clear the prefix cache; False if a block is in use."""
        return self._cache.clear()

    @property
    def request_ids(self) -> list[str]:
        return [*self._running, *self._waiting]

    @property
    def busy(self) -> bool:
        return bool(self._running)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._running or request_id in self._waiting

    def _begin_iteration(self, now: float) -> None:
        budget = self.settings.max_num_batched_tokens
        prefill_tokens = decoding = 0
        for sequence in self._scheduled(now):
            tokens = min(sequence.pending, budget)
            budget -= tokens
            self._batch[sequence.request.request_id] = tokens
            self._allocate(sequence, tokens)
            if sequence.decoding:
                decoding += 1
            else:
                prefill_tokens += tokens
            if budget == 0:
                break
        if self._batch:
            self._batch_ends = now + self.settings.duration(prefill_tokens, decoding)

    def _scheduled(self, now: float) -> Iterable[SimSequence]:
        """Running sequences, then waiting ones while they fit. A waiting sequence is admitted when it is yielded."""
        yield from list(self._running.values())
        while self.admitting and self._waiting and len(self._running) < self.settings.max_num_seqs:
            sequence = next(iter(self._waiting.values()))
            if not self._admit(sequence, now):
                return
            yield sequence

    def _admit(self, sequence: SimSequence, now: float) -> bool:
        cached = sequence.reusable_keys
        cached = cached[: self._cache.cached_prefix(cached)]
        allocation = self._cache.admit(cached, -(-sequence.limit // self.settings.block_size))
        if allocation is None:
            return False
        sequence.admitted(allocation, now)
        request_id = sequence.request.request_id
        self._running[request_id] = self._waiting.pop(request_id)
        self._admitted += 1
        self._queried_tokens += sequence.length
        self._cached_tokens += sequence.computed
        return True

    def _allocate(self, sequence: SimSequence, tokens: int) -> None:
        blocks = -(-(sequence.computed + tokens) // self.settings.block_size)
        self._cache.allocate(sequence.allocation, blocks - sequence.allocation.blocks)

    def _end_iteration(self) -> list[SimOutput]:
        batch, self._batch, self._batch_ends = self._batch, {}, None
        outputs = []
        for request_id, tokens in batch.items():
            sequence = self._running[request_id]
            sequence.computed += tokens
            self._share_complete_blocks(sequence)
            if sequence.pending == 0:
                output = sequence.next_output()
                outputs.append(output)
                if output.finish is not None:
                    self._end(request_id)
        return outputs

    def _share_complete_blocks(self, sequence: SimSequence) -> None:
        complete = min(sequence.computed // self.settings.block_size, len(sequence.keys))
        for key in sequence.keys[len(sequence.allocation.keys) : complete]:
            self._cache.share(sequence.allocation, key)

    def _end(self, request_id: str) -> None:
        self._batch.pop(request_id, None)
        sequence = self._running.pop(request_id, None)
        if sequence is not None:
            self._cache.release(sequence.allocation)

    def _report(self) -> IterationReport:
        usage, admitted = self._cache.usage, self._admitted
        report = IterationReport(
            len(self._running), len(self._waiting), usage, admitted, self._queried_tokens, self._cached_tokens
        )
        self._admitted = self._queried_tokens = self._cached_tokens = 0
        return report
