"""A head, processes of replicas that come and go, and what may happen to them in a soak."""

import asyncio
import itertools
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping

import httpx
from held import child_of, descendants, held_by
from mixed_traffic import PATIENCE_S
from processes import START_S, Cluster, Process, wait_for

from vllm_omni_plugin.admin.admin_keys import find_local_key

BEAT_S, SILENCE_S = 1.0, 6.0
"""Of `--omni-heartbeat-interval` and `--omni-heartbeat-timeout`: a busy machine may leave a process without a core for
seconds, which is no hang."""
COORDINATOR_KILLED = "coordinator killed"
_COUNTED = ("requests_in_flight", "requests_waiting", "requests_running", "requests_held")
_COUNTED_TOKENS = ("prefill_tokens", "decode_tokens")


class Fleet:
    """A head without engines, processes of replicas, and what may happen to them.

    Args:
        cluster: to start them in.
        processes: of replicas; the first is left alone.
        replicas: in each process.
        engines: whether they are vLLM's engines instead of simulated ones; one replica in each process then.
        happened: counts what has happened, by name.

    Attributes:
        head: its process.
        steady: the process of replicas that is left alone.
        replicas: in all processes.
        faults: what may happen, by name.
    """

    def __init__(
        self, cluster: Cluster, processes: int, replicas: int, engines: bool, happened: "Counter[str]"
    ) -> None:
        self._cluster = cluster
        self._each = replicas
        self._engines = engines
        self._happened = happened
        self._flags = ("--omni-heartbeat-interval", str(BEAT_S), "--omni-heartbeat-timeout", str(SILENCE_S))
        self.head = cluster.head("--omni-dp-size-local", "0", "--omni-migration-limit", "20", *self._flags)
        self.steady = self._start()
        # The one that is left alone has the lowest numbers.
        wait_for(lambda: self.steady.is_running() and self._serve(self.steady), "the first replicas serve")
        self._others = [self._start() for _ in range(processes - 1)]
        self._turn = itertools.cycle(range(processes - 1))
        self.replicas = processes * replicas
        self.faults: dict[str, Callable[[], Awaitable[None]]] = {
            "replicas killed": self._kill,
            "replicas told to end": self._end,
            "replicas stopped for a while": self._stop,
            "replica drained and resumed": self._drain,
            COORDINATOR_KILLED: self._kill_coordinator,
            "nothing": self._nothing,
        }

    async def wait_until_complete(self) -> None:
        """Return when all replicas serve. Raises RuntimeError if they do not in time."""
        await until(self._is_complete, "all replicas serve")

    async def let_happen(self, fault: str) -> None:
        """Let one thing happen; returns when what ended has been started again."""
        await self.faults[fault]()
        self._happened[fault] += 1

    def held(self) -> tuple[dict[tuple[str, str], float], Mapping[str, int]]:
        """What the processes hold that are not replaced in every turn, by whom and in which family; and their ids."""
        head, steady = self.head.popen.pid, self.steady.popen.pid
        pids = {"head": head, "coordinator": child_of(head, "coordinator_main").pid, "replica server": steady}
        held = {(name, family): value for name, pid in pids.items() for family, value in held_by(pid).items()}
        if self._engines:
            pids["engine"] = child_of(steady, "EngineCore").pid
            held |= {("engine", family): value for family, value in held_by(pids["engine"], python=False).items()}
        for name in ("head", "replica server"):
            held[name, "children"] = descendants(pids[name])
        return held, pids

    def counted(self) -> float:
        """Requests and tokens that the head still counts as work of replicas, or as waiting for one. Raises OSError."""
        return sum(self._cluster.metric(f"vllm_omni_fleet:{name}") for name in (*_COUNTED, *_COUNTED_TOKENS))

    def accepted(self) -> float:
        """Requests for an answer that the head has sent to replicas, each once however often it moved. Raises OSError.

        By no metric that has a label for replicas: those of replicas that have left are gone.
        """
        return self._cluster.metric("vllm_omni_fleet:decisions_total") - self.moves()

    def moves(self) -> float:
        """How often a request was sent to another replica because its own was lost. Raises OSError."""
        return self._cluster.metric("vllm_omni_fleet:request_moves_total")

    async def _kill(self) -> None:
        number = next(self._turn)
        await asyncio.to_thread(self._others[number].kill)
        await self._replace(number)

    async def _end(self) -> None:
        number = next(self._turn)
        self._others[number].popen.send_signal(signal.SIGTERM)
        await until(lambda: self._others[number].popen.poll() is not None, "replicas have ended")
        await self._replace(number)

    async def _stop(self) -> None:
        victim = self._others[next(self._turn)].popen
        victim.send_signal(signal.SIGSTOP)
        try:
            await asyncio.sleep(2 * SILENCE_S)
        finally:
            victim.send_signal(signal.SIGCONT)
        await asyncio.sleep(SILENCE_S)

    async def _drain(self) -> None:
        headers = {"Authorization": f"Bearer {find_local_key('127.0.0.1', httpx.URL(self._cluster.url).port or 80)}"}
        async with httpx.AsyncClient(
            base_url=self._cluster.url, trust_env=False, timeout=PATIENCE_S, headers=headers
        ) as client:
            listed = (await client.get("/omni/replicas")).json()["replicas"]
            replica = [each["id"] for each in listed if each["status"] == "up"][-1]
            (await client.post(f"/omni/replicas/{replica}/drain")).raise_for_status()
            await asyncio.sleep(SILENCE_S)
            (await client.post(f"/omni/replicas/{replica}/resume")).raise_for_status()

    async def _kill_coordinator(self) -> None:
        coordinator = child_of(self.head.popen.pid, "coordinator_main")
        coordinator.kill()
        await until(lambda: not coordinator.is_running(), "the coordinator has ended")
        await until(self._has_coordinator, "another coordinator serves the head")

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
        if self._engines:
            return self._cluster.node(*self._flags, VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1")
        return self._cluster.sim("--replicas", str(self._each), *self._flags)

    async def _replace(self, number: int) -> None:
        process = self._others[number] = self._start()
        await until(lambda: process.is_running() and self._serve(process), "replicas are back")

    def _serve(self, process: Process) -> bool:
        return process.log.read_text(errors="replace").count("serves at") >= self._each


async def until(condition: Callable[[], object], what: str) -> None:
    """Ask, on another thread, until it is true; can be broken off. Raises RuntimeError after START_S."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + START_S
    while not await asyncio.to_thread(condition):
        if loop.time() > deadline:
            raise RuntimeError(f"not within {START_S:.0f} s: {what}")
        await asyncio.sleep(0.2)
