"""A replica as the head knows it, in front of a simulated engine."""

from bisect import bisect_left
from math import inf

from simulator.engine import LeapEngine
from simulator.requests import Job
from vllm_omni_plugin.balancing import ReplicaLoad
from vllm_omni_plugin.orchestrator.requests.load_ledger import LoadLedger
from vllm_omni_plugin.orchestrator.requests.stage_run import StageRun
from vllm_omni_plugin.sim import EngineSettings
from vllm_omni_plugin.vllm_api.requests.engine_types import CacheSize, LoadReport


class Clock:
    """The time of a simulation.

    Attributes:
        now: seconds.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class SimReplica:
    """A `balancing.ReplicaView` with the head's own bookkeeping (`orchestrator.requests.load_ledger`) and an engine.

    Args:
        replica_id: its place in the fleet.
        settings: its engine's.
        clock: the simulation's.

    Attributes:
        engine: what runs; replaced after a death. Policies for the fleet do not know it, the omniscient one does.
        alive: whether the engine is there, noticed or not.
        slowdown: factor on the times of its engines.
        expected: when the event loop will step the engine.
        in_flight: what it was charged with.
        ledger: what that weighs.
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
        """A new engine with an empty cache takes the place of the old one."""
        self._former_busy_s += self.engine.busy_s
        self.engine = LeapEngine(self._settings, self.slowdown)
        self.alive = True
        self.expected = inf
        self.in_flight: dict[Job, StageRun] = {}
        self.ledger = LoadLedger(CacheSize(self._settings.kv_blocks, self._settings.block_size))

    def serves(self, serving: bool) -> None:
        """It takes requests from now on, or no longer."""
        if self._served_since is not None:
            self.present_s += self._clock.now - self._served_since
        self._served_since = self._clock.now if serving else None

    @property
    def busy_s(self) -> float:
        """Seconds in which its engines computed."""
        return self._former_busy_s + self.engine.busy_s

    @property
    def queue_length(self) -> int:
        """Unfinished requests, as the head counts them."""
        return self.ledger.requests

    @property
    def load(self) -> ReplicaLoad:
        """What the head knows at this moment. Tokens arrive one by one, even if the engine leaps."""
        load = self.ledger.load
        if not self.engine.running:
            return load
        tokens = self.engine.decode_tokens(self._clock.now)
        return load._replace(decode_tokens=tokens, kv_usage=self.engine.cache.usage)

    def matched_tokens(self, keys: list[int], prompt_tokens: int) -> int:
        """Prompt tokens that are cached, or will be when the requests in flight have been computed."""
        limit = (prompt_tokens - 1) // self._settings.block_size
        matched = self.engine.cache.matched(keys, prompt_tokens)
        for job in self.in_flight:
            most = min(limit, len(job.keys))
            # Keys are chained: where two prompts have the same key, they have the same ones before.
            if matched < most and job.keys[matched] == keys[matched]:
                matched = bisect_left(range(most), True, lo=matched, key=lambda i: job.keys[i] != keys[i])
        return matched * self._settings.block_size

    def progress(self) -> list[tuple[Job, int]]:
        """What is in flight, with the tokens of each answer so far: the truth, which no head knows at once."""
        now, engine = self._clock.now, self.engine
        return [(job, engine.produced(job, now)) for job in self.in_flight]

    def unadmitted(self) -> list[Job]:
        """What is in flight and has no KV memory yet."""
        return [job for job in self.in_flight if not job.reserved and not job.shared]

    def charge(self, job: Job, run: StageRun) -> None:
        """A job is about to be sent."""
        self.in_flight[job] = run
        self.ledger.charge(run, self._clock.now)

    def begin(self, job: Job) -> StageRun:
        """Its first output has come."""
        run = self.in_flight[job]
        self.ledger.add_first_output(run, self._clock.now)
        return run

    def release(self, job: Job) -> StageRun:
        """It has ended."""
        run = self.in_flight.pop(job)
        self.ledger.release(run, self._clock.now)
        return run

    def settle(self, report: LoadReport | None) -> None:
        """A message has been dealt with, the report in it last, if it has one."""
        if report is not None:
            self.ledger.report(report)

    def report(self) -> LoadReport:
        """What the engine says of itself with an iteration."""
        return LoadReport(self.engine.waiting, self.engine.running, self.engine.cache.usage)
