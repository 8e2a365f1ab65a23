"""How soon a head knows that a replica is gone: its engine or its server killed, stopped, or its cable cut.

    python benchmarks/detection.py --model DIR --rounds 3

One head without engines, in a network namespace of its own, and one headless node in another, on real engines. Each
fault is caused, the time until the head no longer counts the replica as one that takes requests is measured by asking
`GET /omni/replicas` without pause (a few milliseconds each), and the fault is undone. Needs root, for the namespaces.
"""

import argparse
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import psutil
from processes import COMMON, Process, percentile, tool, wait_for

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.engine.namespaces import HEAD_ADDRESS, Cable  # noqa: E402 (found through the line above)

TIMEOUT_S = 10.0


def main() -> None:
    """Run every fault in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, Cable() as cable:
        bench = Bench(options.model, Path(folder), cable)
        try:
            times: dict[str, list[float]] = {}
            for _ in range(options.rounds):
                for name, fault in bench.faults().items():
                    times.setdefault(name, []).append(fault())
                    print(f"{name}: {times[name][-1]:.3f} s", flush=True)
        finally:
            bench.stop()
    print("\n| fault | median, s | longest, s |\n|---|---:|---:|")
    for name, values in times.items():
        print(f"| {name} | {percentile(values, 0.5):.3f} | {max(values):.3f} |")


class Bench:
    """The head, the node, and what is done to them."""

    def __init__(self, model: Path, folder: Path, cable: Cable) -> None:
        self._cable = cable
        self._folder = folder
        secret = folder / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        master = ("-oma", HEAD_ADDRESS, "-omp", "23877", "--omni-secret-file", str(secret))
        timeout = ("--omni-heartbeat-timeout", str(TIMEOUT_S))
        self._serve = (tool("vllm"), "serve", str(model), *COMMON, *master, *timeout)
        self._starts = 0
        uds = folder / "head.sock"
        at_head = (*self._serve, "--omni-dp-size-local", "0", "--uds", str(uds))
        self._head = Process("head", [*cable.at_head, *at_head], folder / "head.log")
        self._node = self._start_node()
        self._http = httpx.Client(base_url="http://head", transport=httpx.HTTPTransport(uds=str(uds)), timeout=30)
        wait_for(self._serves, "the replica serves")

    def stop(self) -> None:
        """End everything."""
        self._http.close()
        self._node.stop()
        self._head.stop()

    def faults(self) -> dict[str, Callable[[], float]]:
        """Each measures the seconds until the head notices, and waits until the replica serves again."""
        return {
            "SIGKILL engine": self._kill_engine,
            "SIGKILL replica server": self._kill_server,
            "SIGSTOP replica server": self._stop_server,
            "cut link": self._cut_link,
            f"SIGSTOP engine (heartbeat timeout {TIMEOUT_S:g} s)": self._stop_engine,
        }

    def _kill_engine(self) -> float:
        return self._measure(self._engine().kill, lambda: None)

    def _kill_server(self) -> float:
        def restart() -> None:
            self._node = self._start_node()

        return self._measure(self._node.kill, restart)

    def _stop_server(self) -> float:
        server = psutil.Process(self._node.popen.pid)
        return self._measure(server.suspend, server.resume)

    def _cut_link(self) -> float:
        return self._measure(self._cable.cut, self._cable.mend)

    def _stop_engine(self) -> float:
        engine = self._engine()
        return self._measure(lambda: engine.send_signal(signal.SIGSTOP), engine.resume)

    def _measure(self, cause: Callable[[], object], undo: Callable[[], object]) -> float:
        began = time.monotonic()
        cause()
        while self._serves():
            pass
        elapsed = time.monotonic() - began
        undo()
        wait_for(self._serves, "the replica serves again")
        return elapsed

    def _serves(self) -> bool:
        try:
            replicas = self._http.get("/omni/replicas").json()["replicas"]
        except httpx.TransportError:
            return False
        return any(replica["status"] == "up" for replica in replicas)

    def _engine(self) -> psutil.Process:
        pids = re.findall(r"\(process (\d+)\) serves", self._node.log.read_text())
        return psutil.Process(int(pids[-1]))

    def _start_node(self) -> Process:
        self._starts += 1
        log = self._folder / f"node-{self._starts}.log"
        return Process("node", [*self._cable.at_node, *self._serve, "--headless"], log)


if __name__ == "__main__":
    main()
