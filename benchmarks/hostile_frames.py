"""A fleet among peers with bad intentions: what its streams, its processes' memory and its log notice of them.

    python benchmarks/hostile_frames.py --model DIR --frames 1000000

A head without engines and a process with simulated replicas, twice: with a secret and without. While streams run,
random and mutated frames go to every tcp port between the processes, from peers that hold the secret and from others;
then come frames of any size before a handshake, connections that say nothing, readers that do not read, and a storm of
registrations. Every text is compared with that of a quiet run of the same prompt. A second head, attached by hand,
keeps a lease; its ports are attacked too.
"""

import argparse
import asyncio
import itertools
import multiprocessing
import re
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import hostile_peers
import httpx
import psutil
import zmq
from hostile_peers import COORDINATOR_ROLE, REPLICA_ROLE, Guest, Port, Sent
from processes import Cluster, Process, wait_for
from streams import Stream, run_stream

from vllm_omni_plugin.coordinator import OmniCoordClientForHub, ReplicaInfo
from vllm_omni_plugin.curve import Secrets
from vllm_omni_plugin.replicas.control.lease_messages import PROTOCOL_VERSION, Attach

REPLICAS = 2
STREAMS = 4
TOKENS = 100
PROMPTS = [f"Tell the story number {number} to its end" for number in range(8)]
QUIET_S = 10.0
HALF_OPEN = 500
HALF_OPEN_S = 12.0
SUBSCRIBERS = 20
QUESTIONS = 50_000
CALLS = 5000
FILL_S = 30.0
STORM = 10_000
STORM_S = 40.0
LOOKS = 20
"""At the memory of processes, between two calls."""
MIB = 2**20
TROUBLE = re.compile(r"Traceback|could not be handled|Assertion|Fatal|is out of service|is lost")


def main() -> None:
    """Run both fleets and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--frames", type=int, default=1_000_000)
    parser.add_argument("--only", choices=sorted(Siege.ATTACKS), help="this attack instead of all")
    parser.add_argument("--logs", type=Path, help="keep the logs of the processes here")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        logs = options.logs or Path(folder)
        secret = Path(folder, "fleet.secret")
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        fingerprint = fingerprint_of(options.model)
        for name, file in (("secret", secret), ("open", None)):
            (logs / name).mkdir(parents=True, exist_ok=True)
            with Cluster(options.model, logs / name, file) as cluster:
                siege = Siege(name, cluster, file, fingerprint, options.frames // 3)
                asyncio.run(siege.run(options.only))
            siege.report(logs / name)


def fingerprint_of(model: Path) -> dict[str, str]:
    """What a head of these processes must show to be attached."""
    from vllm.engine.arg_utils import AsyncEngineArgs

    from vllm_omni_plugin.vllm_api.launch.model_fingerprint import fingerprint

    return fingerprint(AsyncEngineArgs(str(model), enforce_eager=True, max_model_len=4096).create_engine_config(), 0)


@dataclass
class Phase:
    """What was noticed of one attack.

    Attributes:
        streams: those that ran meanwhile.
        memory: largest resident set by process, in bytes.
        replicas: how many were up at its end.
        guest: answers that the second head got from its engine, or why it lost its lease.
        note: what the attackers saw.
    """

    name: str
    streams: list[Stream] = field(default_factory=list)
    memory: dict[str, int] = field(default_factory=dict)
    replicas: int = 0
    guest: str = ""
    note: str = ""


class Siege:
    """One fleet and the attacks on it.

    Args:
        name: of the fleet.
        cluster: its processes, none of which has been started.
        secret: file, if it has one.
        fingerprint: what a head must show to be attached.
        frames: that each kind of peer sends.
    """

    def __init__(
        self, name: str, cluster: Cluster, secret: Path | None, fingerprint: dict[str, str], frames: int
    ) -> None:
        self._name = name
        self._frames = frames
        self._cluster = cluster
        self._secret = secret
        self._head: Process = cluster.head("--omni-dp-size-local", "0")
        self._sim: Process = cluster.sim("--replicas", str(REPLICAS))
        cluster.wait_until_healthy()
        cluster.wait_for_replicas(REPLICAS)
        self._processes = self._find_processes()
        self._publisher = self._find_publisher()
        self._rows = self._listed()
        self._attach = Attach(PROTOCOL_VERSION, self._rows[0].incarnation, "guest", "c" * 40, fingerprint)
        self._guest = Guest(self._rows[0].control_addr, self._attach, secret)
        self._reference: dict[str, str] = {}
        self._sent: dict[str, dict[str, Sent]] = {}
        self._phases: list[Phase] = []

    async def run(self, only: str | None = None) -> None:
        """All attacks, or one of them."""
        limits = httpx.Limits(max_connections=STREAMS + 4)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(2, spawn) as peers:
            async with httpx.AsyncClient(base_url=self._cluster.url, limits=limits, trust_env=False) as client:
                self._client, self._peers = client, peers
                for prompt in PROMPTS:
                    self._reference[prompt] = (await run_stream(client, prompt, TOKENS)).text
                async with self._phase("quiet, before"):
                    await asyncio.sleep(QUIET_S)
                for name, attack in self.ATTACKS.items():
                    if only in (None, name):
                        await attack(self)
                async with self._phase("quiet, after"):
                    await asyncio.sleep(QUIET_S)
        self._guest.close()

    def report(self, logs: Path) -> None:
        """Print the tables."""
        print(f"\n## Fleet: {self._name}\n")
        for peers, ports in self._sent.items():
            print(f"Frames of {peers}:\n\n| port | in messages | in streams | connections | cut while writing |")
            print("|---|---:|---:|---:|---:|")
            for port, sent in ports.items():
                print(f"| {port} | {sent.in_messages} | {sent.in_streams} | {sent.connections} | {sent.cut} |")
            print(f"| all | {sum(sent.in_messages + sent.in_streams for sent in ports.values())} in total | | | |\n")
        print("| phase | streams | lost | wrong | longest pause, ms | RSS, MiB | replicas up | second head | seen |")
        print("|---|---:|---:|---:|---:|---|---:|---|---|")
        for phase in self._phases:
            self._report_phase(phase)
        for log in sorted(logs.glob("*.log")):
            text = log.read_text(errors="replace")
            refused, dropped = text.count(": Refused ") + text.count("] Refused "), text.count("Dropped a")
            print(
                f"\n{log.stem}: {len(text) // 1024} KiB of log, {refused} lines of refusals, {dropped} of dropped "
                f"frames, {len(TROUBLE.findall(text))} of trouble"
            )

    def _report_phase(self, phase: Phase) -> None:
        lost = [stream for stream in phase.streams if stream.error]
        wrong = [stream for stream in phase.streams if not stream.error and stream.text != self._expected(stream)]
        pause = max((stream.longest_gap for stream in phase.streams), default=0.0)
        memory = ", ".join(f"{name} {size // MIB}" for name, size in phase.memory.items())
        print(
            f"| {phase.name} | {len(phase.streams)} | {len(lost)} | {len(wrong)} | {pause * 1e3:.0f} | {memory} "
            f"| {phase.replicas} | {phase.guest} | {phase.note} |"
        )
        for stream in lost[:3]:
            print("lost:", stream.error)

    def _expected(self, stream: Stream) -> str:
        return self._reference[stream.prompt]

    async def _send_frames(self) -> None:
        """Those without the secret first, if there is one."""
        if self._secret is None:
            await self._send_frames_of("everybody", None)
        else:
            await self._send_frames_of("others", None)
            await self._send_frames_of("holders of the secret", self._secret)

    async def _send_frames_of(self, peers: str, secret: Path | None) -> None:
        tallies = self._sent[peers] = {}
        ports = self._ports()
        async with self._phase(f"frames of {peers}"):
            for seed, port in enumerate(ports):
                tallies[port.name] = await self._by_peer(
                    hostile_peers.send_frames, port, self._frames // len(ports) + 1, secret, seed
                )

    async def _fill(self) -> None:
        """Two attackers, on every port on which a process of the fleet listens."""
        ports = sorted(self._listening())
        async with self._phase(f"frames of any size before the handshake, {len(ports)} ports") as phase:
            work = [self._by_peer(hostile_peers.fill_before_handshake, ports, FILL_S, seed) for seed in range(2)]
            made, written = (sum(told) for told in zip(*await asyncio.gather(*work), strict=True))
            phase.note = f"{made} connections, {written} MiB written"

    def _listening(self) -> set[tuple[str, int]]:
        http = int(self._cluster.url.rpartition(":")[2])
        found = [each for process in self._processes.values() for each in process.net_connections("tcp")]
        return {
            (each.laddr.ip, each.laddr.port)
            for each in found
            if each.status == psutil.CONN_LISTEN and each.laddr.port != http
        }

    async def _half_open(self) -> None:
        async with self._phase(f"{HALF_OPEN} half-open connections per port") as phase:
            ports = self._ports()
            ended = await self._by_peer(hostile_peers.stay_half_open, ports, HALF_OPEN, HALF_OPEN_S)
            phase.note = f"{ended} of {HALF_OPEN * len(ports)} ended within {HALF_OPEN_S:g} s"

    async def _unread_answers(self) -> None:
        async with self._phase(f"{QUESTIONS} questions, no answer read"):
            await self._by_peer(hostile_peers.ask_and_sleep, self._rows[1].control_addr, QUESTIONS, self._secret)

    async def _unread_outputs(self) -> None:
        control = self._rows[1].control_addr
        async with self._phase("attached head that reads nothing") as phase:
            attach = Attach(PROTOCOL_VERSION, self._rows[1].incarnation, "slow", "c" * 40, self._attach.fingerprint)
            after, why = await self._by_peer(hostile_peers.attach_and_sleep, control, attach, self._secret, CALLS)
            phase.note = f"cut off after {after:.1f} s: {why}"

    async def _registrations(self) -> None:
        async with self._phase(f"{STORM} registrations, {SUBSCRIBERS} subscribers that read nothing") as phase:
            most = 0
            # The storm makes the lists long enough to fill what lies between the coordinator and a slow reader.
            sleepers = asyncio.ensure_future(
                self._by_peer(hostile_peers.subscribe_and_sleep, self._publisher, SUBSCRIBERS, STORM_S, self._secret)
            )
            await self._by_peer(hostile_peers.register_many, self._router, STORM, self._secret)
            deadline = time.monotonic() + STORM_S
            while time.monotonic() < deadline:
                most = max(most, len(await self._replicas()))
                await asyncio.sleep(2)
            await sleepers
            phase.note = f"at most {most} in the head's list, {len(await self._replicas())} after {STORM_S:g} s"

    ATTACKS: ClassVar = {
        "frames": _send_frames,
        "fill": _fill,
        "half-open": _half_open,
        "unread-answers": _unread_answers,
        "unread-outputs": _unread_outputs,
        "registrations": _registrations,
    }

    async def _by_peer(self, attack: Callable[..., Any], *args: object) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._peers, attack, *args)

    @asynccontextmanager
    async def _phase(self, name: str) -> AsyncIterator[Phase]:
        """Streams, measurements and the second head while something goes on."""
        phase = Phase(name)
        over = asyncio.Event()
        prompts = itertools.cycle(PROMPTS)
        tasks = [asyncio.create_task(self._stream(prompts, phase, over)) for _ in range(STREAMS)]
        tasks.append(asyncio.create_task(self._watch(phase, over)))
        began = time.monotonic()
        try:
            yield phase
        finally:
            over.set()
            await asyncio.gather(*tasks)
        phase.replicas = sum(replica["status"] == "up" for replica in await self._replicas())
        self._phases.append(phase)
        print(f"{self._name}: {name}: {time.monotonic() - began:.0f} s", flush=True)

    async def _stream(self, prompts: Any, phase: Phase, over: asyncio.Event) -> None:
        while not over.is_set():
            phase.streams.append(await run_stream(self._client, next(prompts), TOKENS))

    async def _watch(self, phase: Phase, over: asyncio.Event) -> None:
        lost, asked, answered = "", 0, self._guest.answers
        while not over.is_set():
            lost = lost or self._guest.beat()
            asked += 1
            self._guest.call(asked, "is_sleeping")
            for _ in range(LOOKS):
                for name, process in self._processes.items():
                    phase.memory[name] = max(phase.memory.get(name, 0), process.memory_info().rss)
                await asyncio.sleep(0.5 / LOOKS)
            self._guest.count_answers()
        phase.guest = f"lost: {lost}" if lost else f"{self._guest.answers - answered} of {asked} calls answered"

    async def _replicas(self) -> list[dict[str, Any]]:
        replicas: list[dict[str, Any]] = (await self._client.get("/omni/replicas", timeout=60)).json()["replicas"]
        return replicas

    @property
    def _router(self) -> str:
        return f"tcp://127.0.0.1:{self._cluster.master_port}"

    def _ports(self) -> list[Port]:
        announcements = hostile_peers.coordinator_samples()
        ports = [
            Port("coordinator ROUTER", self._router, zmq.DEALER, COORDINATOR_ROLE, announcements),
            Port("coordinator PUB", self._publisher, zmq.XSUB, COORDINATOR_ROLE, hostile_peers.SUBSCRIPTIONS),
        ]
        for number, row in enumerate(self._rows):
            samples = hostile_peers.control_samples(self._attach.fingerprint, row.incarnation)
            ports.append(Port(f"replica {number}: control", row.control_addr, zmq.DEALER, REPLICA_ROLE, samples))
            ports.append(Port(f"replica {number}: input", row.input_addr, zmq.PUSH))
            ports.append(Port(f"replica {number}: output", row.output_addr, zmq.PULL))
        lease = self._guest.lease
        ports.append(Port("replica 0: input of the second head", lease.input_addr, zmq.PUSH))
        ports.append(Port("replica 0: output of the second head", lease.output_addr, zmq.PULL))
        return ports

    def _find_processes(self) -> dict[str, psutil.Process]:
        head = psutil.Process(self._head.popen.pid)
        coordinator = next(child for child in head.children() if "coordinator_main" in " ".join(child.cmdline()))
        return {"head": head, "coordinator": coordinator, "sim": psutil.Process(self._sim.popen.pid)}

    def _find_publisher(self) -> str:
        connections = self._processes["coordinator"].net_connections("tcp")
        ports = {connection.laddr.port for connection in connections if connection.status == psutil.CONN_LISTEN}
        (port,) = ports - {self._cluster.master_port}
        return f"tcp://127.0.0.1:{port}"

    def _listed(self) -> list[ReplicaInfo]:
        hub = OmniCoordClientForHub(self._publisher, secrets=Secrets.from_file(self._secret) if self._secret else None)
        wait_for(lambda: len(hub.get_replica_list().replicas) == REPLICAS, "the list of replicas")
        rows = hub.get_replica_list().replicas
        hub.close()
        return rows


if __name__ == "__main__":
    main()
