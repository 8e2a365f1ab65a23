"""A simulated engine that jumps from event to event instead of iterating."""

from collections import deque
from heapq import heappop, heappush
from math import ceil, inf
from typing import NamedTuple

from simulator.cache import BlockCache
from simulator.requests import Job
from vllm_omni_plugin.sim import EngineSettings


class Outcome(NamedTuple):
    """The result of a step.

    Attributes:
        began: jobs that got their first token.
        ended: jobs that got their last token; they may be in `began`, too.
    """

    began: list[Job]
    ended: list[Job]


class LeapEngine:
    """Batches like `vllm_omni_plugin.sim.EngineModel`, in far fewer steps.

    While sequences only decode, all iterations are equally long. So they are one step, until a sequence ends or a
    request arrives that can be admitted. An iteration that computes prompts is a step of its own.

    Args:
        slowdown: factor on the length of all iterations.

    Attributes:
        next_time: when to call `step`; infinity if there is nothing to do.
        busy_s: seconds of iterations that have ended.
    """

    def __init__(self, settings: EngineSettings, slowdown: float = 1.0) -> None:
        self.settings = settings
        self.slowdown = slowdown
        self.cache = BlockCache(settings.kv_blocks, settings.block_size, settings.prefix_caching)
        self.next_time = inf
        self.busy_s = 0.0
        self._waiting: deque[Job] = deque()
        self._prefilling: deque[Job] = deque()
        self._chunks: list[tuple[Job, int]] = []
        self._decoding: dict[Job, None] = {}
        self._ends: list[tuple[int, int, Job]] = []
        self._sequence = 0
        self._iterations = 0
        self._decode_tokens = 0
        self._shared_decoding = 0
        self._begun = 0.0
        self._iteration_s = 0.0
        self._leap = 0

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    def decode_tokens(self, now: float) -> int:
        """Prompt and answer tokens of the decoding sequences so far."""
        return self._decode_tokens + self._ended_iterations(now) * len(self._decoding)

    def produced(self, job: Job, now: float) -> int:
        """Answer tokens of a job so far."""
        if job not in self._decoding:
            return 0
        return self._iterations + self._ended_iterations(now) - job.first_iteration + 1

    def submit(self, job: Job, now: float) -> None:
        """Queue a job for the next iteration."""
        self._waiting.append(job)
        if self._leap == 0:
            self._begin(now)
        elif len(self._waiting) == 1 and not self._chunks and self.running < self.settings.max_num_seqs:
            self._leap = min(self._leap, max(1, ceil((now - self._begun) / self._iteration_s)))
            self.next_time = self._begun + self._leap * self._iteration_s

    def step(self) -> Outcome:
        """End the iterations up to `next_time` and start the next ones."""
        now, leap = self.next_time, self._leap
        self.busy_s += leap * self._iteration_s
        self._iterations += leap
        self._decode_tokens += leap * len(self._decoding)
        ended = self._end_decoding()
        began = [job for job, tokens in self._chunks if self._prefilled(job, tokens)]
        ended += [job for job in began if job.output_tokens == 1]
        for job in began:
            self._prefilling.remove(job)
            self._begin_decoding(job)
        self._begin(now)
        return Outcome(began, ended)

    def _begin(self, now: float) -> None:
        settings, decoding = self.settings, len(self._decoding)
        budget = settings.max_num_batched_tokens - decoding
        self._chunks = []
        for job in self._prefilling:
            budget -= self._schedule(job, budget)
        while budget > 0 and self._waiting and self.running < settings.max_num_seqs:
            if not self.cache.admit(self._waiting[0]):
                break
            job = self._waiting.popleft()
            self._prefilling.append(job)
            budget -= self._schedule(job, budget)
        self._fit()
        self._begun = now
        if not self._chunks and not self._ends:
            self._leap, self.next_time = 0, inf
            return
        prefill = sum(tokens for _, tokens in self._chunks)
        self._iteration_s = settings.duration(prefill, decoding) * self.slowdown
        self._leap = 1 if self._chunks else self._ends[0][0] - self._iterations
        self.next_time = now + self._leap * self._iteration_s

    def _schedule(self, job: Job, budget: int) -> int:
        tokens = min(job.prompt_tokens - job.computed, budget)
        if tokens:
            self._chunks.append((job, tokens))
        return tokens

    def _prefilled(self, job: Job, tokens: int) -> bool:
        """Count computed prompt tokens. Returns whether the prompt is complete."""
        job.computed += tokens
        self.cache.computed(job)
        return job.computed == job.prompt_tokens

    def _begin_decoding(self, job: Job) -> None:
        if job.output_tokens == 1:
            self.cache.release(job, job.prompt_tokens)
            return
        job.first_iteration = self._iterations
        self._decoding[job] = None
        self._decode_tokens += job.prompt_tokens + 1
        self._shared_decoding += job.shared
        self._sequence += 1
        heappush(self._ends, (self._iterations + job.output_tokens - 1, self._sequence, job))

    def _end_decoding(self) -> list[Job]:
        ended = []
        while self._ends and self._ends[0][0] <= self._iterations:
            job = heappop(self._ends)[2]
            del self._decoding[job]
            tokens = job.prompt_tokens + job.output_tokens
            self._decode_tokens -= tokens
            self._shared_decoding -= job.shared
            # The KV entry of the last token is never computed.
            self.cache.release(job, tokens - 1)
            ended.append(job)
        return ended

    def _fit(self) -> None:
        size = self.settings.block_size
        decoding = self._decode_tokens // size + len(self._decoding) // 2 - self._shared_decoding
        chunks = sum(-(-(job.computed + tokens) // size) - job.shared for job, tokens in self._chunks)
        self.cache.fit(max(0, decoding) + chunks)

    def _ended_iterations(self, now: float) -> int:
        """Iterations of the current leap that have ended."""
        if self._leap < 2:
            return 0
        return min(self._leap - 1, int((now - self._begun) / self._iteration_s))
