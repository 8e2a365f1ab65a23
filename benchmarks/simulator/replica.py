"""A simulated replica: the head's accounting of it, and its engine."""

from bisect import bisect_left
from math import inf

from simulator.engine import LeapEngine
from simulator.requests import Job
from vllm_omni_plugin.balancing import ReplicaLoad
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun
from vllm_omni_plugin.sim import EngineSettings
from vllm_omni_plugin.vllm_api.requests.engine_types import EngineSize, LoadReport


class Clock:
    """The time of a simulation in seconds."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimReplica:
    """A `balancing.ReplicaView` with the head's own accounting (`orchestrator.requests.load_ledger`) and an engine.

    Attributes:
        engine: replaced after a crash. Only the omniscient policy reads it.
        alive: false from the crash of the engine on, before the head notices it.
        slowdown: factor on the times of the engine.
        expected: when the event loop will step the engine.
        in_flight: charged jobs.
        present_s: seconds in which it took requests.
    """

    stage_id = 0

    def __init__(self, replica_id: int, settings: EngineSettings, clock: Clock) -> None:
        self.replica_id = replica_id
        self.input_addr = f"sim://{replica_id}/input"
        self.output_addr = f"sim://{replica_id}/output"
        self.slowdown = 1.0
        self.present_s = 0.0
        self._settings = settings
        self._clock = clock
        self._served_since: float | None = None
        self._former_busy_s = 0.0
        self.engine = LeapEngine(settings)
        self.restart()

    def restart(self) -> None:
        """Replace the engine by a new one with an empty cache."""
        self._former_busy_s += self.engine.busy_s
        self.engine = LeapEngine(self._settings, self.slowdown)
        self.alive = True
        self.expected = inf
        self.in_flight: dict[Job, StageRun] = {}
        settings = self._settings
        self.ledger = LoadLedger(
            EngineSize(settings.kv_blocks, settings.block_size, settings.max_num_batched_tokens, settings.max_num_seqs)
        )

    def serves(self, serving: bool) -> None:
        if self._served_since is not None:
            self.present_s += self._clock.now - self._served_since
        self._served_since = self._clock.now if serving else None

    @property
    def busy_s(self) -> float:
        return self._former_busy_s + self.engine.busy_s

    @property
    def queue_length(self) -> int:
        return self.ledger.requests

    @property
    def load(self) -> ReplicaLoad:
        """What the head knows now. Tokens arrive one by one, although the engine jumps."""
        load = self.ledger.load
        if not self.engine.running:
            return load
        tokens = self.engine.decode_tokens(self._clock.now)
        return load._replace(decode_tokens=tokens, kv_usage=self.engine.cache.usage)

    def matched_tokens(self, keys: list[int], prompt_tokens: int) -> int:
        """Prompt tokens that are cached, or will be once the requests in flight are computed."""
        limit = (prompt_tokens - 1) // self._settings.block_size
        matched = self.engine.cache.matched(keys, prompt_tokens)
        for job in self.in_flight:
            most = min(limit, len(job.keys))
            # Keys are chained: if two prompts have the same key, all keys before it are equal.
            if matched < most and job.keys[matched] == keys[matched]:
                matched = bisect_left(range(most), True, lo=matched, key=lambda i: job.keys[i] != keys[i])
        return matched * self._settings.block_size

    def progress(self) -> list[tuple[Job, int]]:
        """Jobs in flight with the answer tokens so far: exact, unlike what a head can know at once."""
        now, engine = self._clock.now, self.engine
        return [(job, engine.produced(job, now)) for job in self.in_flight]

    def unadmitted(self) -> list[Job]:
        """Jobs in flight without KV memory."""
        return [job for job in self.in_flight if not job.reserved and not job.shared]

    def charge(self, job: Job, run: StageRun) -> None:
        self.in_flight[job] = run
        self.ledger.charge(run, self._clock.now)

    def begin(self, job: Job) -> StageRun:
        """Note the first output of a job."""
        run = self.in_flight[job]
        self.ledger.add_first_output(run, self._clock.now)
        return run

    def release(self, job: Job) -> StageRun:
        run = self.in_flight.pop(job)
        self.ledger.release(run, self._clock.now)
        return run

    def settle(self, report: LoadReport | None) -> None:
        """End the handling of a message with its report, if it has one."""
        if report is not None:
            self.ledger.report(report)

    def report(self) -> LoadReport:
        """What the engine reports with each iteration."""
        return LoadReport(self.engine.waiting, self.engine.running, self.engine.cache.usage)
