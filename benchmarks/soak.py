"""Hours of mixed traffic with churn and faults: does anything pile up, and is every request accounted for?

    python benchmarks/soak.py --model DIR --minutes 60 --round 40 --rate 3 --markdown soak.md
    python benchmarks/soak.py --model DIR --minutes 8 --engines --replicas 1 --clients 8

A head without engines, replicas in several processes, simulated ones or vLLM's engines, and clients that send requests
of many kinds. Time is cut into rounds. In each round one thing happens beside the traffic: a process of replicas is
killed, told to end, or stopped for a while, the coordinator is killed, an operator drains a replica, or nothing. Then
the clients pause until nothing is in flight, and what the processes hold is looked at: at rest, so that it must be the
same after every round. One process of replicas is left alone for all the time, and the coordinator in the second half.
Ends with 1 if a request was lost, failed, wrong or refused though it could be answered, or anything grows or is left;
with 3 if a trend is unclear. What other programs of the same user keep in /dev/shm counts, too. Root can give the run
one of its own:

    unshare -m sh -c 'mount -t tmpfs none /dev/shm; exec python benchmarks/soak.py --model DIR'
"""

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import httpx
from held import COUNTING, entries, in_shared_memory
from mixed_traffic import PATIENCE_S, Traffic
from processes import Cluster
from soak_evenness import Evenness
from soak_fleet import COORDINATOR_KILLED, Fleet
from soak_report import Look, Soak, report

KEEP_ALIVE_S = 2.0
"""The server closes idle connections after 5 s. A request on one that it closes at that moment never reaches it."""
SETTLE_S = 6.0
"""Between the last answer and the look at rest, so that the server has closed them."""
END_S = 60.0


class Rounds:
    """The rounds of a run.

    Args:
        fleet: that serves.
        url: of its head.
        traffic: of the clients.
        soak: takes what comes of each round.
        folder: the temporary folder of the fleet.
        clients: that send one request after the other.
        rate: requests per second in traffic, in bursts of one for each client; None: as many as are answered.
    """

    def __init__(
        self, fleet: Fleet, url: str, traffic: Traffic, soak: Soak, folder: Path, clients: int, rate: float | None
    ) -> None:
        self._fleet = fleet
        self._url = url
        self._traffic = traffic
        self._soak = soak
        self._folder = folder
        self._clients = clients
        self._pause_s = clients / rate if rate else 0.0
        self._began = time.monotonic()

    async def run(self, seconds: float, traffic_s: float, told: Callable[[], None]) -> None:
        """Go round until the time is over and everything has happened once; the last round is finished.

        Args:
            seconds: for all rounds.
            traffic_s: seconds of traffic in each round, and more until all replicas serve again.
            told: called after each round.
        """
        for fault in itertools.cycle(self._fleet.faults):
            passed = time.monotonic() - self._began
            if passed > seconds and len(self._soak.rounds) >= len(self._fleet.faults):
                return
            if fault == COORDINATOR_KILLED and passed > seconds / 2 and self._soak.happened[fault]:
                # The last one is left alone, so that one is seen to grow old.
                continue
            await self._round(fault, traffic_s)
            told()

    async def _round(self, fault: str, traffic_s: float) -> None:
        began, asked, over = time.monotonic(), self._traffic.accounts.sent.total(), asyncio.Event()
        limits = httpx.Limits(max_connections=self._clients + 2, keepalive_expiry=KEEP_ALIVE_S)
        evenness = Evenness()
        async with (
            httpx.AsyncClient(base_url=self._url, limits=limits, trust_env=False, timeout=PATIENCE_S) as client,
            asyncio.TaskGroup() as tasks,
        ):
            for _ in range(self._clients):
                tasks.create_task(self._send(client, over))
            tasks.create_task(self._look_at_load(client, over, evenness))
            await asyncio.gather(self._fleet.let_happen(fault), asyncio.sleep(traffic_s))
            await self._fleet.wait_until_complete()
            over.set()
        requests, seconds = self._traffic.accounts.sent.total() - asked, time.monotonic() - began
        counted = await self._until_idle()
        look = await asyncio.to_thread(self._look)
        self._soak.add(fault, requests / seconds, evenness, counted, look)
        print(f"{self._soak.rounds[-1]}", flush=True)

    async def _send(self, client: httpx.AsyncClient, over: asyncio.Event) -> None:
        """One client: a request, and then the next one, or the next one in the next burst."""
        loop = asyncio.get_running_loop()
        # At the same times for all clients.
        bursts = itertools.count(self._began, self._pause_s)
        while not over.is_set():
            await self._traffic.ask_any(client)
            if self._pause_s:
                wait = next(at for at in bursts if at > loop.time()) - loop.time()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(over.wait(), wait)

    async def _look_at_load(self, client: httpx.AsyncClient, over: asyncio.Event, evenness: Evenness) -> None:
        while not over.is_set():
            evenness.note((await client.get("/omni/replicas")).json()["replicas"])
            await asyncio.sleep(1.0)

    async def _until_idle(self) -> float:
        """Wait until the head has nothing in flight; returns what it counts after that, or still after a minute."""
        async with httpx.AsyncClient(base_url=self._url, trust_env=False, timeout=PATIENCE_S) as client:
            deadline = time.monotonic() + END_S
            while time.monotonic() < deadline:
                listed = (await client.get("/omni/replicas")).json()["replicas"]
                if not any(each["in_flight"] for each in listed):
                    break
                await asyncio.sleep(0.2)
        await asyncio.sleep(SETTLE_S)
        return await asyncio.to_thread(self._fleet.counted)

    def _look(self) -> Look:
        held, pids = self._fleet.held()
        held["all", "temporary files"] = len(entries(self._folder))
        held["all", "files in /dev/shm"] = len(in_shared_memory())
        self._soak.accepted, self._soak.moves = self._fleet.accepted(), self._fleet.moves()
        return Look((time.monotonic() - self._began) / 3600, held, pids)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--round", type=float, default=15.0, metavar="SECONDS", help="of traffic in a round at least")
    parser.add_argument("--processes", type=int, default=2, help="that the replicas are spread over, at least 2")
    parser.add_argument("--replicas", type=int, default=3, help="in each process")
    parser.add_argument("--engines", action="store_true", help="vLLM's engines instead of simulated ones")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--rate", type=float, help="requests per second, in bursts; by default as many as are answered")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables there, too")
    options = parser.parse_args()
    if options.engines and options.replicas != 1:
        parser.error("--engines goes with --replicas 1: each process is a node with one engine")
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
                fleet = Fleet(cluster, options.processes, options.replicas, options.engines, happened)
                cluster.wait_until_healthy()
                cluster.wait_for_replicas(fleet.replicas)
                rounds = Rounds(fleet, cluster.url, traffic, soak, Path(folder), options.clients, options.rate)
                asyncio.run(rounds.run(60 * options.minutes, options.round, keep))
        finally:
            # Also of a run that was broken off.
            soak.left_behind = entries(Path(folder))
            soak.shared_after = in_shared_memory()
            keep()
            print(report(soak))
    sys.exit(soak.exit_code)


if __name__ == "__main__":
    main()
