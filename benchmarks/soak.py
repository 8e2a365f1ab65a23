"""Hours of mixed traffic with churn and faults: does anything pile up, and is every request accounted for?

    python benchmarks/soak.py --model DIR --minutes 60 --markdown soak.md

A head without engines, simulated replicas in several processes, and clients that send requests of many kinds. Time is
cut into rounds. In each round one thing happens beside the traffic: a process of replicas is killed, told to end, or
stopped for a while, the coordinator is killed, an operator drains a replica, or nothing. Then the clients pause until
nothing is in flight, and what the processes hold is looked at: at rest, so that it must be the same after every round.
One process of replicas is left alone for all the time. Ends with 1 if a request was lost, failed, wrong or refused
though it could be answered, or anything grows or is left; with 3 if a trend is unclear. What other programs of the
same user keep in /dev/shm counts, too.
"""

import argparse
import asyncio
import itertools
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
from held import COUNTING, child_of, descendants, entries, held_by, in_shared_memory
from mixed_traffic import PATIENCE_S, Traffic
from processes import START_S, Cluster, Process
from soak_report import Look, Soak, report

BEAT_S, SILENCE_S = 0.5, 3.0
"""Of `--omni-heartbeat-interval` and `--omni-heartbeat-timeout`, short so that a hung replica is noticed at once."""
SETTLE_S = 6.0
"""Between the last answer and the look at rest: the server closes idle connections after 5 s."""
END_S = 60.0


class Fleet:
    """A head, processes of simulated replicas, and what may happen to them.

    Args:
        cluster: to start them in.
        processes: of replicas; the first is left alone.
        replicas: in each process.
        happened: counts what has happened, by name.

    Attributes:
        head: its process.
        steady: the process of replicas that is left alone.
        replicas: in all processes.
        faults: what may happen, by name.
    """

    def __init__(self, cluster: Cluster, processes: int, replicas: int, happened: "Counter[str]") -> None:
        self._cluster = cluster
        self._each = replicas
        self._happened = happened
        self._flags = ("--omni-heartbeat-interval", str(BEAT_S), "--omni-heartbeat-timeout", str(SILENCE_S))
        self.head = cluster.head("--omni-dp-size-local", "0", "--omni-migration-limit", "20", *self._flags)
        self.steady = self._start()
        self._others = [self._start() for _ in range(processes - 1)]
        self._turn = itertools.cycle(range(processes - 1))
        self.replicas = processes * replicas
        self.faults: dict[str, Callable[[], Awaitable[None]]] = {
            "replicas killed": self._kill,
            "replicas told to end": self._end,
            "replicas stopped for a while": self._stop,
            "replica drained and resumed": self._drain,
            "coordinator killed": self._kill_coordinator,
            "nothing": self._nothing,
        }

    async def wait_until_complete(self) -> None:
        """Return when all replicas serve. Raises RuntimeError if they do not in time."""
        await _until(self._is_complete, "all replicas serve")

    async def let_happen(self, fault: str) -> None:
        """Let one thing happen; returns when what ended has been started again."""
        await self.faults[fault]()
        self._happened[fault] += 1

    async def _kill(self) -> None:
        number = next(self._turn)
        await asyncio.to_thread(self._others[number].kill)
        await self._replace(number)

    async def _end(self) -> None:
        number = next(self._turn)
        self._others[number].popen.send_signal(signal.SIGTERM)
        await _until(lambda: self._others[number].popen.poll() is not None, "replicas have ended")
        await self._replace(number)

    async def _stop(self) -> None:
        victim = self._others[next(self._turn)].popen
        victim.send_signal(signal.SIGSTOP)
        await asyncio.sleep(2 * SILENCE_S)
        victim.send_signal(signal.SIGCONT)
        await asyncio.sleep(SILENCE_S)

    async def _drain(self) -> None:
        async with httpx.AsyncClient(base_url=self._cluster.url, trust_env=False, timeout=PATIENCE_S) as client:
            listed = (await client.get("/omni/replicas")).json()["replicas"]
            replica = next(each["id"] for each in listed if each["status"] == "up")
            (await client.post(f"/omni/replicas/{replica}/drain")).raise_for_status()
            await asyncio.sleep(SILENCE_S)
            (await client.post(f"/omni/replicas/{replica}/resume")).raise_for_status()

    async def _kill_coordinator(self) -> None:
        coordinator = child_of(self.head.popen.pid, "coordinator_main")
        coordinator.kill()
        await _until(lambda: not coordinator.is_running(), "the coordinator has ended")
        await _until(self._has_coordinator, "another coordinator serves the head")

    async def _nothing(self) -> None:
        """So that there are rounds to compare the others with."""

    def _is_complete(self) -> bool:
        return self._metric("vllm_omni_fleet:replicas", 'state="up"') >= self.replicas

    def _has_coordinator(self) -> bool:
        return self._metric("vllm_omni_fleet:coordinator_connected") == 1

    def _metric(self, name: str, *labels: str) -> float:
        try:
            return self._cluster.metric(name, *labels)
        except OSError:
            # A head on a busy machine may take longer than the time limit for its metrics.
            return 0.0

    def _start(self) -> Process:
        return self._cluster.sim("--replicas", str(self._each), *self._flags)

    async def _replace(self, number: int) -> None:
        process = self._others[number] = self._start()
        await _until(lambda: process.is_running() and self._serve(process), "replicas are back")

    def _serve(self, process: Process) -> bool:
        return process.log.read_text(errors="replace").count("serves at") >= self._each


class Rounds:
    """The rounds of a run.

    Args:
        fleet: that serves.
        url: of its head.
        traffic: of the clients.
        soak: takes what comes of each round.
        folder: the temporary folder of the fleet.
    """

    def __init__(self, fleet: Fleet, url: str, traffic: Traffic, soak: Soak, folder: Path) -> None:
        self._fleet = fleet
        self._url = url
        self._traffic = traffic
        self._soak = soak
        self._folder = folder
        self._began = time.monotonic()

    async def run(self, seconds: float, traffic_s: float, clients: int, told: Callable[[], None]) -> None:
        """Go round until the time is over and everything has happened once; the last round is finished.

        Args:
            seconds: for all rounds.
            traffic_s: seconds of traffic in each round, and more until all replicas serve again.
            clients: that send one request after the other.
            told: called after each round.
        """
        for fault in itertools.cycle(self._fleet.faults):
            if time.monotonic() - self._began > seconds and len(self._soak.rounds) >= len(self._fleet.faults):
                return
            await self._round(fault, traffic_s, clients)
            told()

    async def _round(self, fault: str, traffic_s: float, clients: int) -> None:
        began, asked, over = time.monotonic(), self._traffic.accounts.sent.total(), asyncio.Event()
        limits = httpx.Limits(max_connections=clients + 2)
        async with (
            httpx.AsyncClient(base_url=self._url, limits=limits, trust_env=False, timeout=PATIENCE_S) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(clients):
                tasks.create_task(self._send(client, over))
            looking = tasks.create_task(self._look_at_load(client, over))
            await asyncio.gather(self._fleet.let_happen(fault), asyncio.sleep(traffic_s))
            await self._fleet.wait_until_complete()
            over.set()
        requests, seconds = self._traffic.accounts.sent.total() - asked, time.monotonic() - began
        in_flight = await self._until_idle()
        look = await asyncio.to_thread(self._look)
        self._soak.add(fault, requests / seconds, looking.result(), in_flight, look)
        print(f"{self._soak.rounds[-1]}", flush=True)

    async def _send(self, client: httpx.AsyncClient, over: asyncio.Event) -> None:
        while not over.is_set():
            await self._traffic.ask_any(client)

    async def _look_at_load(self, client: httpx.AsyncClient, over: asyncio.Event) -> list[float]:
        """Coefficient of variation of requests in flight over the replicas that serve, each second."""
        variations = []
        while not over.is_set():
            await asyncio.sleep(1.0)
            listed = (await client.get("/omni/replicas")).json()["replicas"]
            loads = [each["in_flight"] for each in listed if each["status"] == "up"]
            if any(loads):
                variations.append(statistics.pstdev(loads) / statistics.mean(loads))
        return variations

    async def _until_idle(self) -> int:
        """Wait until the head has nothing in flight; returns what it still has after a minute."""
        async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=PATIENCE_S) as client:
            deadline = time.monotonic() + END_S
            while True:
                listed = (await client.get("/omni/replicas")).json()["replicas"]
                in_flight: int = sum(each["in_flight"] for each in listed)
                if not in_flight or time.monotonic() > deadline:
                    break
                await asyncio.sleep(0.2)
        await asyncio.sleep(SETTLE_S)
        return in_flight

    def _look(self) -> Look:
        head = self._fleet.head.popen.pid
        pids = {"head": head, "replicas": self._fleet.steady.popen.pid}
        pids["coordinator"] = child_of(head, "coordinator_main").pid
        held = {(name, family): value for name, pid in pids.items() for family, value in held_by(pid).items()}
        held["head", "children"] = descendants(head)
        held["all", "temporary files"] = entries(self._folder)
        held["all", "files in /dev/shm"] = len(in_shared_memory())
        return Look((time.monotonic() - self._began) / 3600, held)


async def _until(condition: Callable[[], object], what: str) -> None:
    """Ask, on another thread, until it is true; can be broken off. Raises RuntimeError after START_S."""
    deadline = time.monotonic() + START_S
    while not await asyncio.to_thread(condition):
        if time.monotonic() > deadline:
            raise RuntimeError(f"not within {START_S:.0f} s: {what}")
        await asyncio.sleep(0.2)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--round", type=float, default=15.0, metavar="SECONDS", help="of traffic in a round at least")
    parser.add_argument("--processes", type=int, default=2, help="that the replicas are spread over, at least 2")
    parser.add_argument("--replicas", type=int, default=3, help="in each process")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, too")
    options = parser.parse_args()
    # What was started is ended also then.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    traffic, happened = Traffic(random.Random(options.seed)), Counter[str]()
    soak = Soak(traffic.accounts, happened, shared_before=in_shared_memory())

    def keep() -> None:
        if options.markdown is not None:
            options.markdown.write_text(report(soak))

    with tempfile.TemporaryDirectory() as logs, tempfile.TemporaryDirectory() as folder:
        os.environ.update({"TMPDIR": folder} | COUNTING)
        try:
            with Cluster(options.model, Path(logs)) as cluster:
                fleet = Fleet(cluster, options.processes, options.replicas, happened)
                cluster.wait_until_healthy()
                cluster.wait_for_replicas(fleet.replicas)
                rounds = Rounds(fleet, cluster.url, traffic, soak, Path(folder))
                asyncio.run(rounds.run(60 * options.minutes, options.round, options.clients, keep))
        finally:
            # Also of a run that was broken off.
            soak.left_behind = entries(Path(folder))
            soak.shared_after = in_shared_memory()
            keep()
            print(report(soak))
    sys.exit(soak.exit_code)


if __name__ == "__main__":
    main()
