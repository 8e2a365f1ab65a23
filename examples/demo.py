"""Serves a tiny model with two replicas on the CPU, talks to it, and shows which replica did how much.

    python examples/demo.py          leaves the server running until Ctrl-C
    python examples/demo.py --once   exits after the requests

The model and the server's log are kept in build/demo, which git ignores.
"""

import argparse
import asyncio
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from openai import AsyncOpenAI, DefaultAsyncHttpxClient, DefaultHttpxClient, OpenAI, OpenAIError
from prometheus_client.parser import text_string_to_metric_families

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE / "cpu"))

from tiny_model import make_tiny_model  # noqa: E402 (found through the line above)

WORK_FOLDER = HERE.parent / "build" / "demo"
LOG = WORK_FOLDER / "server.log"
MODEL_NAME = "tiny"
REPLICAS = 2
CONCURRENT_REQUESTS = 32
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 20.0
# The server is on this machine: a proxy that the environment names must not come between.
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class DemoError(Exception):
    """What went wrong, in words for the person at the terminal."""


@dataclass(frozen=True)
class Server:
    """A `vllm serve` process, alone in its process group."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path

    def last_line(self) -> str:
        """The last thing it logged, without vLLM's process name, time and place."""
        lines = self.log.read_text(errors="replace").splitlines()
        return re.sub(r"^.*?\] ", "", lines[-1])[:80] if lines else "starting"

    def tail(self, lines: int = 25) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def answers(self) -> bool:
        """Whether /health says that it can serve."""
        try:
            with DIRECT.open(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--once", action="store_true", help="exit after the requests")
    once = parser.parse_args().once
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run_demo(once=once)
    except KeyboardInterrupt:
        print("\ninterrupted")
        return 128 + signal.SIGINT
    except (DemoError, OpenAIError, OSError) as error:
        print(f"\ndemo failed: {error}\nThe server's log: {LOG}", file=sys.stderr)
        return 1
    return 0


def run_demo(*, once: bool) -> None:
    print("making a tiny model with random weights: expect word salad")
    model = make_tiny_model(WORK_FOLDER / "model")
    with running_server(model, LOG) as server:
        wait_until_healthy(server)
        direct = DefaultHttpxClient(trust_env=False)
        with OpenAI(base_url=f"{server.url}/v1", api_key="unused", http_client=direct) as client:
            send_completions(client)
            stream_chat(client)
        asyncio.run(send_concurrently(server))
        print_counts(dispatches_by_replica(server))
        if not once:
            leave_running(server)


@contextlib.contextmanager
def running_server(model: Path, log: Path) -> Iterator[Server]:
    """Start the server, and stop it with all its processes however the block ends."""
    port = free_port()
    command = [
        str(Path(sys.executable).with_name("vllm")),
        *("serve", str(model), "--served-model-name", MODEL_NAME),
        *("--omni-lb-policy", "least-queue-length", "--omni-dp-size-local", str(REPLICAS)),
        *("--enforce-eager", "--max-model-len", "1024"),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    print(f"$ {' '.join(f'{name}={value}' for name, value in environment.items())} {' '.join(command)}")
    print(f"  log: {log}")
    with log.open("wb") as log_file:
        process = subprocess.Popen(
            command,
            env=os.environ | environment,
            stdin=subprocess.DEVNULL,
            stdout=log_file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C must reach the server once, from us, and not its workers
        )
    try:
        yield Server(process, f"http://127.0.0.1:{port}", log)
    finally:
        stop(process)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask the server to leave, wait a little, then kill what is left of its process group. Ctrl-C skips the wait."""
    try:
        if process.poll() is None:
            print("stopping the server")
            process.send_signal(signal.SIGINT)
            process.wait(STOP_TIMEOUT_S)
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        print("it did not stop in time: killing it")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_healthy(server: Server) -> None:
    """Show progress until the server can serve.

    Raises:
        DemoError: it died, or needs longer than START_TIMEOUT_S.
    """
    started = time.monotonic()
    shown = -1
    while not server.answers():
        elapsed = int(time.monotonic() - started)
        if server.process.poll() is not None:
            raise DemoError(f"the server died with status {server.process.returncode}:\n{server.tail()}")
        if elapsed > START_TIMEOUT_S:
            raise DemoError(f"the server does not answer after {elapsed} s:\n{server.tail()}")
        if elapsed // 3 != shown:
            shown = elapsed // 3
            print(f"  {elapsed:3d} s  {server.last_line()}", flush=True)
        time.sleep(0.25)
    print(f"ready after {time.monotonic() - started:.0f} s")


def send_completions(client: OpenAI) -> None:
    for prompt in ("Once upon a time", "The quick question"):
        answer = client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=16, temperature=0)
        print(f"completion: {prompt!r} -> {answer.choices[0].text!r}")


def stream_chat(client: OpenAI) -> None:
    print("streaming chat: ", end="", flush=True)
    stream = client.chat.completions.create(
        model=MODEL_NAME,
        messages=[{"role": "user", "content": "How many engines are running?"}],
        max_tokens=48,
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


async def send_concurrently(server: Server) -> None:
    started = time.monotonic()
    direct = DefaultAsyncHttpxClient(trust_env=False)
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", http_client=direct) as client:
        answers = await asyncio.gather(
            *(
                client.completions.create(model=MODEL_NAME, prompt=f"Request number {number}", max_tokens=32)
                for number in range(CONCURRENT_REQUESTS)
            )
        )
    tokens = sum(answer.usage.completion_tokens for answer in answers if answer.usage)
    elapsed = time.monotonic() - started
    print(f"{len(answers)} concurrent requests: {tokens} tokens in {elapsed:.1f} s")


def dispatches_by_replica(server: Server) -> Counter[int]:
    """How many requests each replica was given, from the server's /metrics."""
    with DIRECT.open(f"{server.url}/metrics", timeout=10) as response:
        text = response.read().decode()
    counts: Counter[int] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm_omni:dispatches_total":
                counts[int(sample.labels["replica"])] += int(sample.value)
    return counts


def print_counts(counts: Counter[int]) -> None:
    """Show who served how many.

    Raises:
        DemoError: a replica served nothing.
    """
    print("requests served:")
    for replica in range(REPLICAS):
        print(f"  replica {replica}: {counts[replica]:3d} {'#' * counts[replica]}")
    if not all(counts[replica] for replica in range(REPLICAS)):
        raise DemoError("a replica served nothing; the server's log may say why")


def leave_running(server: Server) -> None:
    print(
        f"\nThe server runs at {server.url} until Ctrl-C. Try:\n"
        f"  curl {server.url}/v1/completions -H 'Content-Type: application/json' \\\n"
        f"""    -d '{{"model": "{MODEL_NAME}", "prompt": "Hello", "max_tokens": 16}}'\n"""
        f"  curl -s {server.url}/metrics | grep vllm_omni",
        flush=True,
    )
    with contextlib.suppress(KeyboardInterrupt):
        server.process.wait()
        raise DemoError(f"the server ended with status {server.process.returncode}:\n{server.tail()}")
    print()


if __name__ == "__main__":
    sys.exit(main())
